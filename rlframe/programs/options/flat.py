"""Flat options: the fields of an experiment and of its topology's config, side by side, as on the command line."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlframe.errors import UsageError
from rlframe.programs.experiment import Experiment
from rlframe.programs.options import naming
from rlframe.programs.options.fields import field_names, flat_fields
from rlframe.programs.options.object_names import name_objects
from rlframe.programs.topologies.config import TopologyConfig, find_topology


def to_flat(experiment: Experiment) -> dict[str, Any]:
    """Return all options of an experiment by name; `topology` is the topology's name."""
    values = flat_fields(experiment)
    of_topology = flat_fields(values.pop("topology_config"))
    return {"topology": of_topology.pop("name"), **values, **of_topology}


def from_flat(values: dict[str, Any]) -> Experiment:
    """Make the experiment with these options, as `to_flat` returns them; missing ones have their defaults.

    Raises:
        UsageError: an option is of another topology, which this one does not read.
    """
    values = name_objects(values)
    classes = config_classes(values["agent"], values.get("topology"))
    topology = values.pop("topology", next(iter(classes)))
    cls = classes[topology]
    own, read = field_names(Experiment), field_names(cls)
    for field, value in values.items():
        others = [name for name, other in classes.items() if field in field_names(other)]
        if field in own or field in read or value == getattr(classes[others[0]], field):
            continue
        raise UsageError(
            f"{field}={value!r} is for the topology {' or '.join(others)}: {topology} does not read it. Leave it at "
            f"{getattr(classes[others[0]], field)!r}, or choose another topology."
        )
    options = {field: value for field, value in values.items() if field in read}
    if "num_actors" in read:  # by default no more than there are environments for: some presets have one
        options.setdefault("num_actors", min(cls.num_actors, values.get("num_envs", Experiment.num_envs)))  # type: ignore[attr-defined]
    topology_config = cls(**{**options, "name": topology})
    return Experiment(**{field: values[field] for field in own if field in values}, topology_config=topology_config)


def with_fields(experiment: Experiment, **changes: Any) -> Experiment:
    """Return the experiment with other values of some flat options."""
    return from_flat({**to_flat(experiment), **changes})


def config_classes(agent: str, own: str | None = None) -> dict[str, type[TopologyConfig]]:
    """Return the class of options of each topology for an agent, by name; first the agent's default topology.

    Args:
        agent: the agent's name.
        own: a topology that is among them if it is one of the user's own, `file.py:function`.
    """
    learns_from = naming.agent_class(agent).learns_from
    names = dict.fromkeys([*naming.TOPOLOGIES[learns_from], *([] if own is None else [own])])
    return {name: find_topology(name, learns_from).config_cls for name in names}


def option_value(experiment: Experiment, option: str) -> Any:
    """Return the value of an option, as `learning-rate` or `head.num_atoms`; None if there is none."""
    first, *rest = option.replace("-", "_").split(".")
    options = to_flat(experiment)
    if rest and first == "network":
        value = options.get("network_config")
    else:
        value = options.get(first, getattr(options["agent_config"], first, None))
    for name in rest:
        value = getattr(value, name, None)
    return value.name if dataclasses.is_dataclass(value) and hasattr(value, "name") else value
