"""`config.json` of a run directory: save it, load it, and check the options of a resumed run.

The file contains the experiment and notes, such as package versions. A resumed run can change only some options, and
its environment must be the same as before.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from rlframe.engines.base import NodeOptions
from rlframe.envs.names import CHANGED, describe_backend, registration, split
from rlframe.errors import UsageError
from rlframe.interprocess.files import write_atomically
from rlframe.programs.experiment import Experiment
from rlframe.programs.options import registry
from rlframe.programs.options.fields import from_jsonable, to_jsonable
from rlframe.programs.options.make_experiment import fill_configs, to_flat, with_fields
from rlframe.programs.options.object_names import live_object, remember_live_objects
from rlframe.programs.options.registry import OPTIONS, name_objects, name_of, replace_names
from rlframe.programs.topologies.config import AgentOptions, config_class_of, find_topology
from rlframe.user_code.files import module_directories, restore_module_directories


def save_experiment(experiment: Experiment, path: pathlib.Path, notes: dict[str, Any]) -> None:
    """Write `config.json` atomically: the experiment, and `notes` such as package versions and the preset."""
    values = experiment_values(experiment)
    topology = values.pop("topology")
    topology["name"] = name_of("topology", topology["name"])
    content = {
        "experiment": {**name_objects(values), "topology": name_objects(topology)},
        "modules": module_directories(experiment.named_options.values()),
        "notes": to_jsonable(notes),
    }
    write_atomically(path, json.dumps(content, indent=2), "\n")
    remember_live_objects(path, experiment.named_options)


def experiment_values(experiment: Experiment) -> dict[str, Any]:
    """Return a dict with an experiment's JSON-compatible values. The key `topology` contains the topology's config."""
    values = to_jsonable(experiment)
    return {"topology": values.pop("topology_config"), **values}


def load_experiment(
    path: str | os.PathLike[str], given: Mapping[str, Any] | None = None, *, replace: bool = False
) -> Experiment:
    """Read `config.json` of a run directory.

    Args:
        path: path of the directory or the file.
        given: option -> name, class or function that replaces a saved name. Only live names are replaced: names of
            objects that are not defined in a file.
        replace: if True, replace the other names too.

    Raises:
        UsageError: the file does not exist or is not JSON, or a field is unknown or has the wrong type.
    """
    path = pathlib.Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}. Give the path of a run directory.") from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict) or not isinstance(content.get("experiment"), dict):
        raise UsageError(f'{path} is not the config of a run: it must contain {{"experiment": {{...}}}}.')
    modules = content.get("modules")
    restore_module_directories(modules if isinstance(modules, dict) else {})
    values = replace_names(content["experiment"], path, given or {}, replace)
    agent = values.get("agent", Experiment.agent)
    agent_cls = registry.agent_class(agent if isinstance(agent, str) else Experiment.agent)
    topology = values.pop("topology", {"name": next(iter(registry.TOPOLOGIES[agent_cls.learns_from]))})
    if not isinstance(topology, dict) or not isinstance(topology.get("name"), str):
        raise UsageError(f'{path}: experiment.topology: expected {{"name": ...}}, got {topology!r}.')
    topology = replace_names(topology, path, given or {}, replace)
    topology_cls = config_class_of(find_topology(topology["name"], agent_cls.learns_from))
    topology = from_jsonable(topology_cls, topology, f"{path}: topology")
    if isinstance(config := values.get("agent_config"), dict):
        config = {field: live_object(path, field, each, given or {}) for field, each in config.items()}
        values["agent_config"] = from_jsonable(agent_cls.config_cls, config, f"{path}: agent_config")
    network_cls = registry.network_config_class(topology.network) if isinstance(topology, AgentOptions) else None
    if network_cls is not None and isinstance(topology.network_config, dict):
        network = from_jsonable(network_cls, topology.network_config, f"{path}: network_config")
        topology = dataclasses.replace(topology, network_config=network)
    return fill_configs(from_jsonable(Experiment, {**values, "topology_config": topology}, f"{path}: experiment"))


def resume_experiment(saved: Experiment, wanted: Experiment) -> Experiment:
    """Return the experiment of a resumed run: the options of `wanted`, with the schedule length of `saved`.

    Raises:
        UsageError: `wanted` changes an option that a resumed run cannot change.
    """
    now_all, changeable = to_flat(wanted), _changeable(wanted)
    for name, before in to_flat(saved).items():
        if name in changeable:
            continue
        before, now = to_jsonable(before), to_jsonable(now_all.get(name))
        if name in OPTIONS:
            now = name_of(name, now)
        if now != before:
            name, before, now = _first_difference(name, before, now)
            raise UsageError(
                f"The run was started with {name} = {before!r}; a resumed run cannot change it to {now!r}. "
                "To change it, start a new run with --config RUN_DIR/config.json --init-from RUN_DIR."
            )
    schedule_steps = saved.schedule_steps or saved.steps
    if wanted.schedule_steps not in (0, saved.schedule_steps, schedule_steps):
        raise UsageError(
            f"The schedules of the run end at step {schedule_steps}; a resumed run cannot change this to "
            f"schedule_steps = {wanted.schedule_steps}. To change it, start a new run with "
            "--config RUN_DIR/config.json --init-from RUN_DIR."
        )
    return with_fields(wanted, schedule_steps=0 if schedule_steps == wanted.steps else schedule_steps)


def _changeable(experiment: Experiment) -> set[str]:
    """Return the names of the options that a resumed run can change.

    Of these, only `steps` affects learning. New `steps` do not change the schedules.
    """
    fields = [*dataclasses.fields(experiment), *dataclasses.fields(experiment.topology_config)]
    marked = {field.name for field in fields if field.metadata.get("changeable")}
    return marked | {field.name for field in dataclasses.fields(NodeOptions)}


def last_values(experiment: Experiment) -> dict[str, float]:
    """Return option -> last value, for the schedules that end before the last step of a resumed run."""
    from rlframe.agents.schedules import known_values, scheduled_fields  # imports JAX

    if not 0 < experiment.schedule_steps < experiment.steps:
        return {}
    config = experiment.agent_config
    found = {name: known_values(config, name) for name in scheduled_fields(config) if getattr(config, name) is not None}
    return {name: values[-1] for name, values in found.items() if len(values) > 1}


def _first_difference(name: str, before: Any, now: Any) -> tuple[str, Any, Any]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            if before.get(key) != now.get(key):
                return key, before.get(key), now.get(key)
    return name, before, now


# --- the library that creates the environment: its description is saved in `config.json` and compared after a resume


def import_env(experiment: Experiment) -> None:
    """If the environment's name is `module:Id`, import the module now.

    Without this import, the run could use an outdated version of the module, which is still loaded.
    """
    is_game = experiment.topology_config.learns_from == "steps"
    if is_game and registry.is_library_env(experiment.env) and ":" in split(experiment.env)[1]:
        registration(experiment.env)


def backend_note(experiment: Experiment) -> dict[str, str]:
    """Return a note for `config.json`: which library creates the environment. Return {} for the user's own class."""
    if experiment.topology_config.learns_from != "steps" or not registry.is_library_env(experiment.env):
        return {}
    return {"env_backend": describe_backend(experiment.env)}


def check_backend(notes: Mapping[str, Any], experiment: Experiment) -> None:
    """Raise UsageError if the user had registered the run's environment, and this process would create another one.

    Args:
        notes: notes of the run's config.
        experiment: experiment of the run.
    """
    import_env(experiment)
    noted = notes.get("env_backend")
    try:
        now = backend_note(experiment).get("env_backend")
    except UsageError as error:
        now, problem = None, str(error)
    else:
        problem = f"In this process, {experiment.env} is created by {now}."
    if noted is not None and is_different_backend(noted, now):
        raise UsageError(
            f"The run's environment {experiment.env} was created by {noted}. {problem} Before you resume or "
            "evaluate the run, register the same environment under this id: import its module in Python. A run "
            "imports the module automatically if its environment is named module:Id."
        )


def is_different_backend(noted: str, now: str | None) -> bool:
    """Return True if two descriptions of an environment's library differ, and one of them was registered by the user.

    A change from EnvPool's version of an environment to Gymnasium's version, or back, is not a difference.
    """
    if not (_is_users(noted) or _is_users(now)):
        return False
    if now is not None and "Gymnasium (__main__" in (noted.partition(":")[0], now.partition(":")[0]):
        # One description contains `__main__` instead of the module's name, so compare only the text after the colon.
        return noted.partition(":")[2] != now.partition(":")[2]
    return noted != now


def _is_users(backend: str | None) -> bool:
    if backend is None or not backend.startswith("Gymnasium ("):
        return False
    return backend.endswith(f"{CHANGED})") or not backend.startswith(("Gymnasium (gymnasium.", "Gymnasium (rlframe."))
