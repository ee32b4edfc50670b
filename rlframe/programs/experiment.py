"""The description of a run: everything that decides its numbers, and nothing else."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rlframe.envs.names import backend, registration, split
from rlframe.envs.registered import restore, users_spec
from rlframe.errors import UsageError
from rlframe.programs.options import naming
from rlframe.programs.options.fields import (
    choices_of,
    chosen,
    convert,
    hints_of,
    option_names,
    resolved,
    to_jsonable,
    with_options,
)
from rlframe.programs.options.naming import is_live
from rlframe.programs.options.object_names import OPTIONS, check_can_leave, name_of, named
from rlframe.programs.presets import Preset, find_preset
from rlframe.programs.topologies.config import TopologyConfig, check_limits, find_topology
from rlframe.user_files import forget_changed, look_in, places

MAX_SEED = 2**31 - 1
_PARTS = (
    "name",
    "agent",
    "topology_config",
    "agent_config",
    "network_config",
)  # fields that are no options, or are given otherwise


def _single_process() -> Any:
    return find_topology("single_process").config_cls()


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What to train, on what, for how long, in which program. `config.json` of a run directory holds one of these.

    Agents that learn from games count environment steps, agents that learn language count learner steps (after the
    supervised ones of their config). `make_experiment` makes one from flat keywords and a preset; `agent_config` left
    at None is the agent's defaults.
    """

    agent: str = "ppo"  # a name that `rlframe agents` lists, or file.py:Class
    env: str = "CartPole-v1"  # a name that `rlframe envs` lists, or file.py:make_env; for language file.py:Class
    steps: int = 100_000  # environment (language: learner) steps of the whole run: schedules end there
    seed: int = 1
    num_envs: int = 8  # in all: actors share them, so presets mean the same however many there are
    env_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)  # options of the environment itself
    eval_every: int = 0  # steps between two evaluations; 0: only the one at the end (language: after the warm-up, too)
    # steps between two checkpoints; 0: only when the run stops. (A topology of several processes saves every 30 s in
    # any case: its learner may die, and must not begin anew.)
    checkpoint_every: int = 100_000
    log_every: int = 0  # steps between two rows of the logs; 0: a 100th of the run, 10,000 at most
    topology_config: Any = dataclasses.field(default_factory=_single_process)  # of the topology: docs/programs.md
    agent_config: Any = None

    def __post_init__(self) -> None:
        check_limits(self)
        if not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"seed must be between 0 and {MAX_SEED}, got {self.seed}.")
        if not isinstance(self.topology_config, TopologyConfig):
            raise UsageError(
                f"An Experiment's topology_config is a TopologyConfig, got {self.topology_config!r}; make_experiment "
                "takes the topology's name."
            )
        self.topology_config.check(self)
        if any(map(is_live, self.names.values())) and not self.topology_config.engine_class.in_process:
            check_can_leave(self.names, self.topology_config.name)

    @property
    def names(self) -> dict[str, Any]:
        """The options that name classes and functions."""
        return {option: name for option, name in flat(self).items() if option in OPTIONS}

    def __getstate__(self) -> dict[str, Any]:
        # A node in another process lacks what the user registered with Gymnasium in this one.
        is_game = self.topology_config.learns_from == "steps" and naming.is_library_env(self.env)
        of_gymnasium = is_game and backend(self.env) == "gymnasium"
        spec = registration(self.env) if of_gymnasium else None
        return {**vars(self), "registered": spec, "places": places(self.names.values())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        look_in(state.pop("places"))
        restore(state.pop("registered"))
        vars(self).update(state)

    @property
    def synchronous(self) -> Experiment:
        """The same with all environments of a pool in step, as evaluations need them."""
        topology_config = dataclasses.replace(self.topology_config, async_envs=False, wait_num=None)
        return dataclasses.replace(self, topology_config=topology_config)

    @property
    def waits_for(self) -> int:
        """Environments of a pool that an actor waits for: all, unless they are asynchronous."""
        if not self.topology_config.async_envs:
            return self.envs_per_pool
        return -(-self.envs_per_pool // 3) if self.topology_config.wait_num is None else self.topology_config.wait_num

    @property
    def envs_per_actor(self) -> int:
        """Environments of each actor."""
        return self.num_envs // self.topology_config.shares[0]

    @property
    def envs_per_pool(self) -> int:
        """Environments of each of an actor's pools."""
        return self.envs_per_actor // self.topology_config.shares[1]

    @property
    def row_every(self) -> int:
        """Steps between two rows of the logs."""
        return self.log_every or min(max(self.steps // 100, 1), 10_000)


# --- flat options: the fields of an experiment and of its topology's config, side by side


def flat(experiment: Experiment) -> dict[str, Any]:
    """All options of an experiment by name; `topology` is the topology's name."""
    values = {name: getattr(experiment, name) for name in field_names(Experiment)}
    of_topology = flat_fields(values.pop("topology_config"))
    return {"topology": of_topology.pop("name"), **values, **of_topology}


def flat_fields(config: Any) -> dict[str, Any]:
    """The values of a dataclass's fields, by name."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}


def field_names(cls: Any) -> list[str]:
    """The names of a dataclass's fields."""
    return [field.name for field in dataclasses.fields(cls)]


def from_flat(values: dict[str, Any]) -> Experiment:
    """Make the experiment with these options, as `flat` returns them; missing ones have their defaults.

    Raises:
        UsageError: an option is of another topology, which this one does not read.
    """
    values = named(values)
    known = config_classes(values["agent"], values.get("topology"))
    name = values.get("topology", next(iter(known)))
    cls = known[name]
    own, read = field_names(Experiment), field_names(cls)
    for field, value in values.items():
        others = [each for each, other in known.items() if field in field_names(other)]
        if field == "topology" or field in own or field in read or value == getattr(known[others[0]], field):
            continue
        raise UsageError(
            f"{field}={value!r} is for the topology {' or '.join(others)}: {name} does not read it. Leave it at "
            f"{getattr(known[others[0]], field)!r}, or choose another topology."
        )
    told = {field: value for field, value in values.items() if field in read}
    if "num_actors" in read:  # by default no more than there are environments for: some presets have one
        told.setdefault("num_actors", min(cls.num_actors, values.get("num_envs", Experiment.num_envs)))  # type: ignore[attr-defined]
    topology_config = cls(**{**told, "name": name})
    return Experiment(**{field: values[field] for field in own if field in values}, topology_config=topology_config)


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
    """The value of an option, as `learning-rate`, `network.hidden` or `head.num_atoms`; None if there is none such."""
    first, *rest = option.replace("-", "_").split(".")
    options = flat(experiment)
    if rest and first == "network":
        value = options.get("network_config")
    else:
        value = options.get(first, getattr(options["agent_config"], first, None))
    for name in rest:
        value = getattr(value, name, None)
    return value.name if dataclasses.is_dataclass(value) and hasattr(value, "name") else value


def with_fields(experiment: Experiment, **changes: Any) -> Experiment:
    """The experiment with other values of some flat options."""
    return from_flat({**flat(experiment), **changes})


# --- experiments from presets


def make_experiment(
    agent: str | type = "ppo",
    env: str | Callable[..., Any] | None = None,
    *,
    preset: str = "auto",
    agent_config: Any = None,
    network_config: Any = None,
    **fields: Any,
) -> Experiment:
    """An `Experiment` with the preset of its agent and environment filled in.

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
    fields = named(fields)  # before the files are loaded: a file may change the directory
    agent_name = name_of("agent", agent) or Experiment.agent
    env_name = name_of("env", env) or default_env(agent_name)
    defaults = with_preset(find_preset(preset, agent_name, env_name), agent_name, env_name)
    configs = {"agent_config": agent_config, "network_config": network_config}
    return changed(defaults, {**fields, **{name: each for name, each in configs.items() if each is not None}})


def changed(defaults: Experiment, options: Mapping[str, Any], others: Iterable[str] = ()) -> Experiment:
    """The experiment with other values of some options: those of `rlframe train`, with underscores.

    Args:
        defaults: the experiment.
        options: by name.
        others: names of options that the caller takes itself, which an unknown one may be meant for.

    Raises:
        UsageError: an option is unknown, or its value is of a wrong type.
    """
    options, agent = named(options), defaults.agent
    own = _own_hints(agent, convert(str, options.get("topology", defaults.topology_config.name), "topology"))
    if "network" in own and "network" in options:
        network = convert(own["network"], options["network"], "network")
        if network != defaults.topology_config.network:
            defaults = with_fields(defaults, network=network, network_config=None)
    defaults = complete(defaults)
    parts = {"agent_config": ""} | ({"network_config": "network."} if "network" in own else {})
    options = {name: value for name, value in options.items() if name not in parts or value is not None}
    configs = {part: value for part in parts if (value := flat(defaults).get(part)) is not None}
    for part in parts.keys() & options.keys():
        given = options[part]
        configs[part] = given if part not in configs else convert(type(configs[part]), given, part)
    configs = {part: chosen(config, options) if part == "agent_config" else config for part, config in configs.items()}
    in_parts = {part: option_names(config, parts[part]) for part, config in configs.items()}
    known = [*own, *parts, *itertools.chain(*in_parts.values())]
    found = resolved(options, known, f"an experiment with {agent}", functools.partial(where_is, agent), others)
    values = {name: convert(own[name], value, name) for name, value in found.items() if name in own}
    for part, names in in_parts.items():
        told = {name.removeprefix(parts[part]): found[name] for name in names if name in found and name not in own}
        whole = flat_fields(configs[part]) if part in found else {}
        values[part] = with_options(configs[part], {**whole, **told}, parts[part])
    return with_fields(defaults, **values)


def _own_hints(agent: str, topology: str) -> dict[str, Any]:
    """The annotations of the options of an experiment and of all topologies for its agent."""
    classes = (*config_classes(agent, topology).values(), Experiment)
    hints = {name: hint for cls in classes for name, hint in hints_of(cls).items()}
    return {name: hint for name, hint in hints.items() if name not in _PARTS} | {"topology": str}


def where_is(agent: str, option: str, form: str = "{}={!r}") -> str:
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
        for field, hint in hints_of(naming.agent_class(agent).config_cls).items()
        for name, cls in choices_of(hint).items()
        if re.sub(rf"^{field}[._]", "", option) in field_names(cls)
    ]
    if choices:
        return f" It is an option of {' or '.join(choices)}."
    agents = [each for each in naming.AGENTS if option in field_names(naming.agent_class(each).config_cls)]
    return f" Agents that have it: {', '.join(agents)}." if agents else ""


def default_env(agent: str) -> str:
    """The environment of an agent for which none is named."""
    return next(iter(config_classes(agent).values())).defaults.get("env", Experiment.env)


def with_preset(preset: Preset | None, agent: str, env: str) -> Experiment:
    """The defaults of an agent on an environment, changed as the preset says."""
    config_cls = naming.agent_class(agent).config_cls
    values = {**next(iter(config_classes(agent).values())).defaults, "agent": agent, "env": env}
    if preset is None:
        return complete(from_flat(values))
    values.update(preset.values("run"), agent_config=with_options(config_cls(), preset.values("agent")))
    of_env = {"env_kwargs", "eval_env_kwargs"} & values.keys()
    if of_env and naming.is_library_env(env) and split(env)[0] != "envpool" and users_spec(split(env)[1]) is not None:
        values = {name: value for name, value in values.items() if name not in of_env}  # they are EnvPool's
    described = complete(from_flat(values))
    network = preset.values("network")
    if not network:
        return described
    return with_fields(
        described, network_config=dataclasses.replace(described.topology_config.network_config, **network)
    )


def complete(experiment: Experiment) -> Experiment:
    """Fill in `agent_config` and `network_config` where they are None."""
    from rlframe.agents.net_factory import own_config  # imports JAX, as any agent does

    agent_cls = naming.agent_class(experiment.agent)
    if experiment.agent_config is None:
        experiment = dataclasses.replace(experiment, agent_config=agent_cls.config_cls())
    config = experiment.topology_config
    network_cls = naming.network_config_class(getattr(config, "network", None))
    if network_cls is not None and config.network_config is None:
        config = dataclasses.replace(config, network_config=own_config(network_cls, agent_cls.networks))
    return dataclasses.replace(experiment, topology_config=config)


# --- resuming

# Options that a resumed run may change: they do not change the numbers, except `steps`, whose schedules are kept.
_CHANGEABLE = {"steps", "schedule_steps", "num_workers", "eval_every", "log_every"}
_CHANGEABLE |= {"eval_episodes", "eval_num_envs", "eval_max_episode_length"}
_CHANGEABLE |= {"engine", "operator", "ray_address", "accelerators", "max_restarts", "hang_timeout", "grace_seconds"}
_CHANGEABLE |= {"checkpoint_every", "replay_checkpoint_every", "answer_timeout", "check_finite"}
_CHANGEABLE |= {"min_actors", "mean_staleness", "until_learner_steps", "until_seconds", "until_return"}
_CHANGEABLE |= {"slots", "service_port", "policy_port"}


def continued(saved: Experiment, wanted: Experiment) -> Experiment:
    """Return the experiment of a resumed run: `wanted`, with the schedules of `saved`.

    Raises:
        UsageError: they differ in an option that a resumed run cannot change.
    """
    now_all = flat(wanted)
    for name, before in flat(saved).items():
        if name in _CHANGEABLE:
            continue
        before, now = to_jsonable(before), to_jsonable(now_all.get(name))
        if name in OPTIONS:
            now = name_of(name, now)
        if now != before:
            name, before, now = _first_difference(name, before, now)
            raise UsageError(
                f"The run was started with {name} = {before!r}; a resumed run cannot change it to {now!r}. "
                "Start a new run, with --config RUN_DIR/config.json for the rest."
            )
    if "schedule_steps" not in now_all:
        return wanted
    schedule_steps = saved.topology_config.schedule_steps or saved.steps
    return with_fields(wanted, schedule_steps=0 if schedule_steps == wanted.steps else schedule_steps)


def _first_difference(name: str, before: Any, now: Any) -> tuple[str, Any, Any]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            if before.get(key) != now.get(key):
                return key, before.get(key), now.get(key)
    return name, before, now
