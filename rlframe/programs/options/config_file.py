"""`config.json` of a run directory: the experiment as JSON, with notes for a reader and for later sessions."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from rlframe.envs.names import CHANGED, describe_backend, registration, split
from rlframe.errors import UsageError
from rlframe.interprocess.files import write_atomically
from rlframe.programs.experiment import Experiment, complete
from rlframe.programs.options import naming
from rlframe.programs.options.fields import from_jsonable, to_jsonable
from rlframe.programs.options.object_names import named, remember, with_given
from rlframe.programs.topologies.config import find_topology
from rlframe.user_files import look_in, places


def save_experiment(experiment: Experiment, path: pathlib.Path, notes: dict[str, Any]) -> None:
    """Write `config.json` atomically: the experiment, and `notes` for a reader (versions, preset)."""
    values = experiment_values(experiment)
    topology = {("topology" if name == "name" else name): value for name, value in values.pop("topology").items()}
    values, topology = named(values), named(topology)
    values["topology"] = {"name": topology.pop("topology"), **topology}
    content = {"experiment": values, "modules": places(experiment.names.values()), "notes": to_jsonable(notes)}
    write_atomically(path, json.dumps(content, indent=2), "\n")
    remember(path, experiment.names)


def experiment_values(experiment: Experiment) -> dict[str, Any]:
    """Return an experiment as what `json.dumps` takes. The config of its topology is `topology`."""
    values = to_jsonable(experiment)
    return {"topology": values.pop("topology_config"), **values}


def load_experiment(
    path: str | os.PathLike[str], given: Mapping[str, Any] | None = None, *, replace: bool = False
) -> Experiment:
    """Read `config.json` of a run directory.

    Args:
        path: of the directory or the file.
        given: by option, names, classes and functions in place of those that no file defines.
        replace: whether they take the place of others as well.

    Raises:
        UsageError: there is no such file, it is no JSON, or a field in it is unknown or of a wrong type.
    """
    path = pathlib.Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}. Name the config.json of a run directory.") from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict) or not isinstance(content.get("experiment"), dict):
        raise UsageError(f'{path} is no config of a run: it must hold {{"experiment": {{...}}}}.')
    modules = content.get("modules")
    look_in(modules if isinstance(modules, dict) else {})
    values = with_given(content["experiment"], path, given or {}, replace)
    agent = values.get("agent", Experiment.agent)
    agent_cls = naming.agent_class(agent if isinstance(agent, str) else Experiment.agent)
    topology = values.pop("topology", {"name": next(iter(naming.TOPOLOGIES[agent_cls.learns_from]))})
    if not isinstance(topology, dict) or not isinstance(topology.get("name"), str):
        raise UsageError(f'{path}: experiment.topology: expected {{"name": ...}}, got {topology!r}.')
    topology = with_given(topology, path, given or {}, replace)
    topology_cls = find_topology(topology["name"], agent_cls.learns_from).config_cls
    topology = from_jsonable(topology_cls, topology, f"{path}: topology")
    if isinstance(values.get("agent_config"), dict):
        values["agent_config"] = from_jsonable(agent_cls.config_cls, values["agent_config"], f"{path}: agent_config")
    network_cls = naming.network_config_class(getattr(topology, "network", None))
    if network_cls is not None and isinstance(topology.network_config, dict):
        network = from_jsonable(network_cls, topology.network_config, f"{path}: network_config")
        topology = dataclasses.replace(topology, network_config=network)
    return complete(from_jsonable(Experiment, {**values, "topology_config": topology}, f"{path}: experiment"))


# --- the library that makes the environment: noted in the config, and checked by later sessions


def import_env(experiment: Experiment) -> None:
    """Import the module of an environment `module:Id` before the run, which would keep an older module of this name."""
    is_game = experiment.topology_config.learns_from == "steps"
    if is_game and naming.is_library_env(experiment.env) and ":" in split(experiment.env)[1]:
        registration(experiment.env)


def backend_note(experiment: Experiment) -> dict[str, str]:
    """Return the note for the config that names the library which makes the environment; {} for a file's."""
    if experiment.topology_config.learns_from != "steps" or not naming.is_library_env(experiment.env):
        return {}
    return {"env_backend": describe_backend(experiment.env)}


def check_backend(notes: Mapping[str, Any], experiment: Experiment) -> None:
    """Raise UsageError if the id of a run's environment, which the user registered, means another now, or nothing.

    Args:
        notes: of the run's config.
        experiment: of the run.
    """
    import_env(experiment)
    noted = notes.get("env_backend")
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
