"""Which library makes the environment that a run names: noted in its config, and checked by later sessions."""

from __future__ import annotations

from rlframe.envs.names import CHANGED, describe_backend, registration, split
from rlframe.errors import UsageError
from rlframe.programs.experiment import Experiment
from rlframe.programs.options import naming
from rlframe.programs.run_dir.directory import RunDir


def import_env(experiment: Experiment) -> None:
    """Import the module of an environment `module:Id` before the run, which would keep an older module of this name."""
    is_game = experiment.topology.learns_from == "steps"
    if is_game and naming.is_library_env(experiment.env) and ":" in split(experiment.env)[1]:
        registration(experiment.env)


def backend_note(experiment: Experiment) -> dict[str, str]:
    """Return the note for the config that names the library which makes the environment; {} for a file's."""
    if experiment.topology.learns_from != "steps" or not naming.is_library_env(experiment.env):
        return {}
    return {"env_backend": describe_backend(experiment.env)}


def check_backend(directory: RunDir, experiment: Experiment) -> None:
    """Raise UsageError if the id of a run's environment, which the user registered, means another now, or nothing."""
    import_env(experiment)
    noted = directory.notes().get("env_backend")
    try:
        now = backend_note(experiment).get("env_backend")
    except UsageError as error:
        now, problem = None, str(error)
    else:
        problem = f"Here {experiment.env} is made by {now}."
    if noted is not None and is_other_backend(noted, now):
        raise UsageError(
            f"The run's environment {experiment.env} was made by {noted}. {problem} Before you resume or "
            "evaluate the run, register the id as it was: import its module, from Python. A run imports the module by "
            "itself if its environment is named module:Id."
        )


def is_other_backend(noted: str, now: str | None) -> bool:
    """Return True if the user registered either, and they are not the same. EnvPool's and Gymnasium's own are alike."""
    if not (_is_users(noted) or _is_users(now)):
        return False
    if now is not None and "Gymnasium (__main__" in (noted.partition(":")[0], now.partition(":")[0]):
        # The module of a script has another name where the script is imported.
        return noted.partition(":")[2] != now.partition(":")[2]
    return noted != now


def _is_users(backend: str | None) -> bool:
    if backend is None or not backend.startswith("Gymnasium ("):
        return False
    return backend.endswith(f"{CHANGED})") or not backend.startswith(("Gymnasium (gymnasium.", "Gymnasium (rlframe."))
