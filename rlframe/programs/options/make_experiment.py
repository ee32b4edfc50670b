"""Create experiments from the user's options: `make_experiment("dqn", MyEnv, steps=20_000, head="categorical")`.

1. `name_objects` replaces classes and functions by their names: `/home/me/my_env.py:MyEnv`.
2. `find_preset` finds the preset for the agent and the environment.
3. `apply_preset` creates the defaults of the agent, its topology and its network, and applies the preset.
4. `change_options` applies the given options. It resolves their names, checks each value against the annotation of its
   field, and divides them into flat options, options of the agent's config and options of the network's config.
5. `from_flat` creates the `Experiment` with the config of its topology.

`rlframe train` does the same, and parses its arguments between steps 3 and 4. Presets, scripts and the command line all
change an experiment with one call of `change_options`.
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

# These fields are not options, or their option has a different name.
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
    """Create an `Experiment` with the preset of its agent and environment.

    Args:
        agent: a name, `file.py:Class` or the class.
        env: a name, `file.py:make_env`, or a class or function that creates an environment. None means the default of
            the agent's topology, such as CartPole-v1.
        preset: "auto" (the matching preset, if any), "none", or a preset's name.
        agent_config: a complete config of the agent. The preset does not change it.
        network_config: a complete config of the named network.
        **fields: options that differ from the preset: fields of `Experiment`, of the topology's config and of the
            agent's config. Fields of the network's config and of configs inside the agent's config have a prefix:
            `network_hidden`, or `**{"network.hidden": ...}`. `topology` is a name or `file.py:function`. `network` may
            be a function.

    Raises:
        UsageError: a name or field is unknown, or a value has the wrong type.
    """
    forget_changed()
    fields = name_objects(fields)  # make paths absolute now: user code may change the working directory
    defaults, _ = default_experiment(name_of("agent", agent), name_of("env", env), preset)
    configs = {"agent_config": agent_config, "network_config": network_config}
    return change_options(defaults, {**fields, **{name: each for name, each in configs.items() if each is not None}})


def change_options(defaults: Experiment, options: Mapping[str, Any], others: Iterable[str] = ()) -> Experiment:
    """Return the experiment with new values for some options. Names are those of `rlframe train`, with underscores.

    `{"num_envs": 4, "head": "categorical", "head_num_atoms": 21}` changes an experiment with dqn in these steps:

    1. Set the named head in the agent's config, because the head has options too. Then collect all fields: of the
       experiment and its topology's config (flat options), of the agent's config, and of the network's config.
    2. `resolve_names` finds the full names: num_envs, head and head.num_atoms.
    3. `num_envs` is a flat option: `convert` checks its value. `head` and `head.num_atoms` change the agent's config.

    Args:
        defaults: the experiment to change.
        options: new values by name.
        others: names of the caller's own options. An error message can suggest them for an unknown option.

    Raises:
        UsageError: an option is unknown, or its value has the wrong type.
    """
    options, agent = name_objects(options), defaults.agent
    # 1. Collect the fields.
    topology = convert(str, options.get("topology", defaults.topology_config.name), "topology")
    hints = _hints_of_flat(agent, defaults.topology_config.name, topology)
    defaults = fill_configs(_with_network(defaults, options, hints))
    prefixes = {"agent_config": ""} | ({"network_config": "network."} if "network" in hints else {})
    options = {name: value for name, value in options.items() if name not in prefixes or value is not None}
    configs = _configs_to_change(defaults, options, prefixes)
    names = {part: list(option_values(config, prefixes[part])) for part, config in configs.items()}
    # 2. Resolve the names.
    known = [*hints, *prefixes, *itertools.chain(*names.values())]
    given = resolve_names(
        options, known, f"an experiment with {agent}", functools.partial(describe_option_owner, agent), others
    )
    # 3. Set the values of flat options and of configs.
    values = {name: convert(hints[name], value, name) for name, value in given.items() if name in hints}
    for part, config in configs.items():
        whole = flat_fields(config) if part in given else {}  # check the types of all fields of a given config
        inner = {name.removeprefix(prefixes[part]): given[name] for name in names[part] if name in given.keys() - hints}
        values[part] = with_options(config, {**whole, **inner}, prefixes[part])
    return with_fields(defaults, **values)


def _hints_of_flat(agent: str, *extra_topologies: str) -> dict[str, Any]:
    """Return a dict: flat option -> annotation, for the experiment and all topologies that the agent can use."""
    classes = (*config_classes(agent, *extra_topologies).values(), Experiment)
    hints = {name: hint for cls in classes for name, hint in hints_of(cls).items()}
    return {name: hint for name, hint in hints.items() if name not in _NOT_FLAT} | {"topology": str}


def _with_network(experiment: Experiment, options: Mapping[str, Any], hints: Mapping[str, Any]) -> Experiment:
    """Return the experiment with the network in `options`. If the network changes, set the network's config to None."""
    if "network" not in hints or "network" not in options:
        return experiment
    network = convert(hints["network"], options["network"], "network")
    if network == AgentOptions.of(experiment).network:
        return experiment
    return with_fields(experiment, network=network, network_config=None)


def _configs_to_change(experiment: Experiment, options: Mapping[str, Any], parts: Iterable[str]) -> dict[str, Any]:
    """Return the configs of the agent and the network, before single options are changed.

    A complete config in `options` replaces the experiment's. Choices in `options`, such as `head`, are applied.
    """
    values = to_flat(experiment)
    configs = {part: values[part] for part in parts if values.get(part) is not None}
    for part in parts:
        if part in options:
            configs[part] = convert(type(configs[part]), options[part], part) if part in configs else options[part]
    configs["agent_config"] = with_choices(configs["agent_config"], options)
    return configs


def describe_option_owner(agent: str, option: str, form: str = "{}={!r}") -> str:
    """Return a sentence about an option that an agent lacks: which choices (such as heads) or other agents have it.

    Args:
        agent: name of the agent.
        option: name of the option, such as `num_atoms`, `head.num_atoms` or `head_num_atoms`.
        form: format string that describes a choice by its option and its name.

    Returns:
        The sentence, or "" if the option does not exist.
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
    return f" Agents with this option: {', '.join(agents)}." if agents else ""


def default_experiment(agent: str | None, env: str | None, preset: str) -> tuple[Experiment, Preset | None]:
    """Return (experiment, preset): the defaults with the preset applied. The preset is None if there is none.

    Args:
        agent: name of the agent. None means ppo.
        env: name of the environment. None means the default of the agent's topology.
        preset: as for `make_experiment`.
    """
    agent = agent or Experiment.agent
    env = env or next(iter(config_classes(agent).values())).defaults.get("env", Experiment.env)
    found = find_preset(preset, agent, env)
    return apply_preset(found, agent, env), found


def apply_preset(preset: Preset | None, agent: str, env: str) -> Experiment:
    """Return an experiment with the defaults for the agent and environment, changed by the preset."""
    of_topology = next(iter(config_classes(agent).values())).defaults
    defaults = fill_configs(from_flat({**of_topology, "agent": agent, "env": env}))
    options = {} if preset is None else preset.options
    of_env = {"env_kwargs", "eval_env_kwargs"} & options.keys()
    if of_env and registry.is_library_env(env) and split(env)[0] != "envpool" and user_spec(split(env)[1]) is not None:
        options = {name: value for name, value in options.items() if name not in of_env}  # these are options of EnvPool
    return change_options(defaults, options)


def fill_configs(experiment: Experiment) -> Experiment:
    """Return the experiment with default configs in `agent_config` and `network_config` if they are None."""
    from rlframe.agents.net_factory import network_config_for  # imports JAX

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


# --- flat options: one dict with the fields of an experiment and of its topology's config, as on the command line


def to_flat(experiment: Experiment) -> dict[str, Any]:
    """Return an experiment's flat options: name -> value. `topology` is the name of the topology."""
    values = flat_fields(experiment)
    of_topology = flat_fields(values.pop("topology_config"))
    return {"topology": of_topology.pop("name"), **values, **of_topology}


def from_flat(values: Mapping[str, Any], *extra_topologies: str) -> Experiment:
    """Create an experiment from flat options in the format of `to_flat`. Missing options have their defaults.

    Args:
        values: option -> value. Options of other topologies are allowed if they have their default values.
        extra_topologies: user-defined topologies whose options are allowed too.

    Raises:
        UsageError: an option that the topology does not use differs from its default.
    """
    values = name_objects(values)
    classes = config_classes(values["agent"], values.get("topology"), *extra_topologies)
    topology = values.pop("topology", next(iter(classes)))
    cls = classes[topology]
    of_experiment = {name: values.pop(name) for name in field_names(Experiment) if name in values}
    of_topology = {name: values.pop(name) for name in field_names(cls) if name in values}
    for option, value in values.items():
        _check_has_default(option, value, topology, classes)
    if issubclass(cls, GameProgram):  # some presets have one environment, so one actor must be enough
        of_topology.setdefault("num_actors", min(cls.num_actors, of_experiment.get("num_envs", Experiment.num_envs)))
    return Experiment(**of_experiment, topology_config=cls(**{**of_topology, "name": topology}))


def _check_has_default(option: str, value: Any, topology: str, classes: Mapping[str, type[TopologyConfig]]) -> None:
    """Raise UsageError if an option that a topology does not use differs from its default."""
    readers = [name for name, cls in classes.items() if option in field_names(cls)]
    default = getattr(classes[readers[0]], option)
    if value != default:
        raise UsageError(
            f"{option}={value!r} is for the topology {' or '.join(readers)}: {topology} does not use it. Set it to "
            f"{default!r}, or choose another topology."
        )


def with_fields(experiment: Experiment, **changes: Any) -> Experiment:
    """Return the experiment with new values for some flat options."""
    return from_flat({**to_flat(experiment), **changes}, experiment.topology_config.name)


def config_classes(agent: str, *extra_topologies: str | None) -> dict[str, type[TopologyConfig]]:
    """Return the config class of each topology of an agent, by name. The agent's default topology is first.

    Args:
        agent: name of the agent.
        extra_topologies: more topologies, such as user-defined ones (`file.py:function`). None is skipped.
    """
    learns_from = registry.agent_class(agent).learns_from
    names = dict.fromkeys([*registry.TOPOLOGIES[learns_from], *(name for name in extra_topologies if name is not None)])
    return {name: config_class_of(find_topology(name, learns_from)) for name in names}


def option_value(experiment: Experiment, option: str) -> Any:
    """Return the value of an option, such as `learning-rate` or `head.num_atoms`. Return None for an unknown option."""
    flat = to_flat(experiment)
    values = all_option_values(flat, flat["agent_config"], flat.get("network_config"))
    value = values.get(option.replace("-", "_"))
    return value.name if dataclasses.is_dataclass(value) and hasattr(value, "name") else value


def all_option_values(flat: Mapping[str, Any], agent_config: Any, network_config: Any) -> dict[str, Any]:
    """Return a dict for `change_options`: name -> value of each option. `network_config` may be None."""
    of_network = {} if network_config is None else option_values(network_config, "network.")
    return {**flat, **option_values(agent_config), **of_network}
