"""Experiments from what a user gives: `make_experiment("dqn", MyEnv, steps=20_000, head="categorical")`.

1. `name_objects` replaces classes and functions by their names: `/home/me/my_env.py:MyEnv`.
2. `find_preset` looks for tuned values of the agent and the environment.
3. `apply_preset` makes the defaults of the agent, its topology and its network, and changes them by the preset.
4. `change_options` changes them by the options that are given. It resolves the name of each option, checks its value
   against the annotation of its field, and sorts the options: flat ones, those of the agent's config, those of the
   network's config.
5. `from_flat` makes the `Experiment` of these, with the config of its topology.

`rlframe train` does the same: it parses its arguments between steps 3 and 4. Every change of an experiment, by a
preset, a script or the command line, is one call of `change_options`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rlframe.envs.gymnasium_registry import user_spec
from rlframe.envs.names import split
from rlframe.errors import UsageError
from rlframe.programs.experiment import Experiment
from rlframe.programs.options import registry
from rlframe.programs.options.fields import (
    choices_of,
    convert,
    field_names,
    flat_fields,
    hints_of,
    option_values,
    resolve_names,
    with_choices,
    with_options,
)
from rlframe.programs.options.registry import name_objects, name_of
from rlframe.programs.presets import Preset, find_preset
from rlframe.programs.topologies.config import (
    AgentOptions,
    GameProgram,
    TopologyConfig,
    config_class_of,
    find_topology,
)
from rlframe.user_code.files import forget_changed

# Fields that are no flat options, or are given otherwise.
_NOT_FLAT = ("name", "agent", "topology_config", "agent_config", "network_config")


def make_experiment(
    agent: str | type = "ppo",
    env: str | Callable[..., Any] | None = None,
    *,
    preset: str = "auto",
    agent_config: Any = None,
    network_config: Any = None,
    **fields: Any,
) -> Experiment:
    """Make an `Experiment` with the preset of its agent and environment.

    Args:
        agent: a name, `file.py:Class` or the class.
        env: a name, `file.py:make_env`, or a class or function that makes an environment; None: the default of the
            agent's topology, as CartPole-v1.
        preset: "auto" (the one that fits, if any), "none", or a preset's name.
        agent_config: the agent's whole config; then no preset is applied to it.
        network_config: the named network's whole config.
        **fields: what differs from the preset: fields of `Experiment`, of its topology's config and of the agent's
            config. Those of the network's config, and of configs in the agent's, are `network_hidden`, or
            `**{"network.hidden": ...}`. `topology` is a name, or `file.py:function`; `network` may be a function.

    Raises:
        UsageError: a name or field is unknown, or a value is of a wrong type.
    """
    forget_changed()
    fields = name_objects(fields)  # before the files are loaded: a file may change the directory
    defaults, _ = default_experiment(name_of("agent", agent), name_of("env", env), preset)
    configs = {"agent_config": agent_config, "network_config": network_config}
    return change_options(defaults, {**fields, **{name: each for name, each in configs.items() if each is not None}})


def change_options(defaults: Experiment, options: Mapping[str, Any], others: Iterable[str] = ()) -> Experiment:
    """Return the experiment with other values of some options: those of `rlframe train`, with underscores.

    `{"num_envs": 4, "head": "categorical", "head_num_atoms": 21}` change an experiment with dqn in these steps:

    1. Options are fields of three kinds of dataclasses: the experiment with its topology's config (flat options), the
       agent's config, and the network's. The agent's config gets the head that is named, as that has options too.
    2. `resolve_names` finds the options that are meant: num_envs, head and head.num_atoms.
    3. `num_envs` is flat: `convert` checks its value. `head` and `head.num_atoms` go into the agent's config.

    Args:
        defaults: the experiment.
        options: by name.
        others: names of options that the caller takes itself, which an unknown one may be meant for.

    Raises:
        UsageError: an option is unknown, or its value is of a wrong type.
    """
    options, agent = name_objects(options), defaults.agent
    # 1. The fields that are options.
    topology = convert(str, options.get("topology", defaults.topology_config.name), "topology")
    hints = _hints_of_flat(agent, defaults.topology_config.name, topology)
    defaults = fill_configs(_with_network(defaults, options, hints))
    prefixes = {"agent_config": ""} | ({"network_config": "network."} if "network" in hints else {})
    options = {name: value for name, value in options.items() if name not in prefixes or value is not None}
    configs = _configs_to_change(defaults, options, prefixes)
    names = {part: list(option_values(config, prefixes[part])) for part, config in configs.items()}
    # 2. The options that are meant.
    known = [*hints, *prefixes, *itertools.chain(*names.values())]
    given = resolve_names(
        options, known, f"an experiment with {agent}", functools.partial(describe_option_owner, agent), others
    )
    # 3. Their values: flat ones, and those in configs.
    values = {name: convert(hints[name], value, name) for name, value in given.items() if name in hints}
    for part, config in configs.items():
        whole = flat_fields(config) if part in given else {}  # the types of a config that is given whole are checked
        inner = {name.removeprefix(prefixes[part]): given[name] for name in names[part] if name in given.keys() - hints}
        values[part] = with_options(config, {**whole, **inner}, prefixes[part])
    return with_fields(defaults, **values)


def _hints_of_flat(agent: str, *own: str) -> dict[str, Any]:
    """Return the annotations of the options of an experiment and of all topologies, as `config_classes` has them."""
    classes = (*config_classes(agent, *own).values(), Experiment)
    hints = {name: hint for cls in classes for name, hint in hints_of(cls).items()}
    return {name: hint for name, hint in hints.items() if name not in _NOT_FLAT} | {"topology": str}


def _with_network(experiment: Experiment, options: Mapping[str, Any], hints: Mapping[str, Any]) -> Experiment:
    """Return the experiment with the network that the options name. Another network has another config."""
    if "network" not in hints or "network" not in options:
        return experiment
    network = convert(hints["network"], options["network"], "network")
    if network == AgentOptions.of(experiment).network:
        return experiment
    return with_fields(experiment, network=network, network_config=None)


def _configs_to_change(experiment: Experiment, options: Mapping[str, Any], parts: Iterable[str]) -> dict[str, Any]:
    """Return the configs of agent and network: those of the experiment, or given whole, with the choices of options."""
    values = to_flat(experiment)
    configs = {part: values[part] for part in parts if values.get(part) is not None}
    for part in parts:
        if part in options:
            configs[part] = convert(type(configs[part]), options[part], part) if part in configs else options[part]
    configs["agent_config"] = with_choices(configs["agent_config"], options)
    return configs


def describe_option_owner(agent: str, option: str, form: str = "{}={!r}") -> str:
    """A sentence on what has an option that an agent lacks: a choice of its config, as a head, or other agents.

    Args:
        agent: the agent's name.
        option: as `num_atoms`, `head.num_atoms` or `head_num_atoms`.
        form: of a choice, from its option and its name.

    Returns:
        "" if nothing has it.
    """
    choices = [
        form.format(field, name)
        for field, hint in hints_of(registry.agent_class(agent).config_cls).items()
        for name, cls in choices_of(hint).items()
        if re.sub(rf"^{field}[._]", "", option) in field_names(cls)
    ]
    if choices:
        return f" It is an option of {' or '.join(choices)}."
    agents = [each for each in registry.AGENTS if option in field_names(registry.agent_class(each).config_cls)]
    return f" Agents that have it: {', '.join(agents)}." if agents else ""


def default_experiment(agent: str | None, env: str | None, preset: str) -> tuple[Experiment, Preset | None]:
    """Return the experiment before any option is changed, and the preset that was applied, if any.

    Args:
        agent: a name; None: ppo.
        env: a name; None: the default of the agent's topology.
        preset: as for `make_experiment`.
    """
    agent = agent or Experiment.agent
    env = env or next(iter(config_classes(agent).values())).defaults.get("env", Experiment.env)
    found = find_preset(preset, agent, env)
    return apply_preset(found, agent, env), found


def apply_preset(preset: Preset | None, agent: str, env: str) -> Experiment:
    """Return the defaults of an agent on an environment, changed as the preset says."""
    of_topology = next(iter(config_classes(agent).values())).defaults
    defaults = fill_configs(from_flat({**of_topology, "agent": agent, "env": env}))
    options = {} if preset is None else preset.options
    of_env = {"env_kwargs", "eval_env_kwargs"} & options.keys()
    if of_env and registry.is_library_env(env) and split(env)[0] != "envpool" and user_spec(split(env)[1]) is not None:
        options = {name: value for name, value in options.items() if name not in of_env}  # they are EnvPool's
    return change_options(defaults, options)


def fill_configs(experiment: Experiment) -> Experiment:
    """Fill in `agent_config` and `network_config` where they are None."""
    from rlframe.agents.net_factory import network_config_for  # imports JAX, as any agent does

    agent_cls = registry.agent_class(experiment.agent)
    if experiment.agent_config is None:
        experiment = dataclasses.replace(experiment, agent_config=agent_cls.config_cls())
    config = experiment.topology_config
    if isinstance(config, AgentOptions) and config.network_config is None:
        network_cls = registry.network_config_class(config.network)
        if network_cls is not None:
            return experiment.with_topology_options(
                network_config=network_config_for(network_cls, agent_cls.network_configs)
            )
    return experiment


# --- flat options: the fields of an experiment and of its topology's config, side by side, as on the command line


def to_flat(experiment: Experiment) -> dict[str, Any]:
    """Return all options of an experiment by name; `topology` is the topology's name."""
    values = flat_fields(experiment)
    of_topology = flat_fields(values.pop("topology_config"))
    return {"topology": of_topology.pop("name"), **values, **of_topology}


def from_flat(values: Mapping[str, Any], *own: str) -> Experiment:
    """Make the experiment with these options, as `to_flat` returns them; missing ones have their defaults.

    Args:
        values: by option. One of a topology that is not chosen may be there, at its default.
        own: topologies of the user's, beside the one that is chosen.

    Raises:
        UsageError: an option that the topology does not read has another value than its default.
    """
    values = name_objects(values)
    classes = config_classes(values["agent"], values.get("topology"), *own)
    topology = values.pop("topology", next(iter(classes)))
    cls = classes[topology]
    of_experiment = {name: values.pop(name) for name in field_names(Experiment) if name in values}
    of_topology = {name: values.pop(name) for name in field_names(cls) if name in values}
    for option, value in values.items():
        _check_has_default(option, value, topology, classes)
    if issubclass(cls, GameProgram):  # by default no more than there are environments for: some presets have one
        of_topology.setdefault("num_actors", min(cls.num_actors, of_experiment.get("num_envs", Experiment.num_envs)))
    return Experiment(**of_experiment, topology_config=cls(**{**of_topology, "name": topology}))


def _check_has_default(option: str, value: Any, topology: str, classes: Mapping[str, type[TopologyConfig]]) -> None:
    """Raise UsageError if an option that a topology does not read has another value than in those that read it."""
    readers = [name for name, cls in classes.items() if option in field_names(cls)]
    default = getattr(classes[readers[0]], option)
    if value != default:
        raise UsageError(
            f"{option}={value!r} is for the topology {' or '.join(readers)}: {topology} does not read it. Leave it at "
            f"{default!r}, or choose another topology."
        )


def with_fields(experiment: Experiment, **changes: Any) -> Experiment:
    """Return the experiment with other values of some flat options."""
    return from_flat({**to_flat(experiment), **changes}, experiment.topology_config.name)


def config_classes(agent: str, *own: str | None) -> dict[str, type[TopologyConfig]]:
    """Return the class of options of each topology for an agent, by name; first the agent's default topology.

    Args:
        agent: the agent's name.
        own: topologies that are among them too, as those of the user's own, `file.py:function`. None is left out.
    """
    learns_from = registry.agent_class(agent).learns_from
    names = dict.fromkeys([*registry.TOPOLOGIES[learns_from], *(name for name in own if name is not None)])
    return {name: config_class_of(find_topology(name, learns_from)) for name in names}


def option_value(experiment: Experiment, option: str) -> Any:
    """Return the value of an option, as `learning-rate` or `head.num_atoms`; None if there is none."""
    flat = to_flat(experiment)
    values = all_option_values(flat, flat["agent_config"], flat.get("network_config"))
    value = values.get(option.replace("-", "_"))
    return value.name if dataclasses.is_dataclass(value) and hasattr(value, "name") else value


def all_option_values(flat: Mapping[str, Any], agent_config: Any, network_config: Any) -> dict[str, Any]:
    """Return the values of all options by the names that `change_options` takes. A network need not have a config."""
    of_network = {} if network_config is None else option_values(network_config, "network.")
    return {**flat, **option_values(agent_config), **of_network}
