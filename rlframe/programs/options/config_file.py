"""Save and load `config.json` of a run directory. It contains the experiment and notes, such as package versions."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from rlframe.errors import UsageError
from rlframe.interprocess.files import write_atomically
from rlframe.programs.experiment import Experiment
from rlframe.programs.options import registry
from rlframe.programs.options.fields import from_jsonable, to_jsonable
from rlframe.programs.options.make_experiment import fill_configs
from rlframe.programs.options.object_names import live_object, remember_live_objects
from rlframe.programs.options.registry import name_objects, name_of, replace_names
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
