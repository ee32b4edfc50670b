"""The description of a run: everything that decides its numbers, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any, Literal, Union

from rlframe import handles
from rlframe.engines.base import GRACE
from rlframe.errors import UsageError, suggest
from rlframe.interprocess.files import write_atomically
from rlframe.interprocess.heartbeat import TIMEOUT
from rlframe.programs import naming
from rlframe.programs.jsonable import from_jsonable, to_jsonable
from rlframe.programs.presets import Preset, find_preset
from rlframe.types import ReplaySpec, Sequence

Topology = Literal["single_process", "heavy_env", "light_env", "distributed", "elastic"]
Replay = Literal["auto", "local", "shared_memory", "reverb"]
EngineName = Literal["launchpad", "threads"]
EnvType = Literal["auto", "loop", "thread", "process", "envpool"]

MAX_SEED = 2**31 - 1

# What each topology may keep its experience in, first what it is meant for.
_REPLAYS: dict[str, tuple[str, ...]] = {
    "single_process": ("local",),
    "heavy_env": ("shared_memory", "reverb"),
    "light_env": ("shared_memory", "reverb"),
    "distributed": ("reverb",),
    "elastic": ("shared_memory", "reverb"),
}

# The least value of fields, where they are not None.
_AT_LEAST = {
    1: "steps num_envs eval_episodes num_actors num_inferencers num_pools min_actors num_workers",
    0: "eval_every checkpoint_every replay_checkpoint_every schedule_steps log_every max_restarts hang_timeout "
    "grace_seconds",
}

_PROGRAMS, _WITH_SERVICES = ("heavy_env", "light_env", "distributed"), ("light_env", "distributed")

# The topologies that read a field which the others do not.
_READ_BY: dict[str, tuple[str, ...]] = {
    "num_actors": (*_PROGRAMS, "elastic"),
    "min_actors": ("elastic",),
    "max_actors": ("elastic",),
    "mean_staleness": ("elastic",),
    "until_learner_steps": ("elastic",),
    "until_seconds": ("elastic",),
    "until_return": ("elastic",),
    "engine": _PROGRAMS,
    "max_restarts": (*_PROGRAMS, "elastic"),
    "hang_timeout": (*_PROGRAMS, "elastic"),
    "grace_seconds": (*_PROGRAMS, "elastic"),
    "num_inferencers": _WITH_SERVICES,
    "num_pools": _WITH_SERVICES,
    "replay_checkpoint_every": ("single_process",),
}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What to train, on what, for how long. `config.json` of a run directory holds one of these.

    `agent_config` and `network_config` left at None are the agent's and the network's defaults;
    `make_experiment` fills them from a preset.
    """

    agent: str = "ppo"  # a name that `rlframe agents` lists, or file.py:Class
    env: str = "CartPole-v1"  # a name that `rlframe envs` lists, or file.py:make_env
    steps: int = 100_000  # environment steps of the whole run: schedules end there
    seed: int = 1
    num_envs: int = 8  # in all: the actors of a topology share them, so presets mean the same however many there are
    topology: Topology = "single_process"  # which processes there are: see docs/programs.md
    num_actors: int = 2  # of a topology of several processes; of elastic to begin with
    min_actors: int = 1  # of elastic: there are never fewer
    max_actors: int = 8  # of elastic: there are never more, and no more than the machine has cores, but by hand
    until_learner_steps: Union[int, None] = None  # of elastic: updates at which it ends, if not before
    until_seconds: Union[float, None] = None  # of elastic: wall time at which it ends, if not before
    until_return: Union[float, None] = None  # of elastic: mean return of an evaluation at which it ends
    mean_staleness: Union[float, None] = None  # of elastic: versions above which there are fewer actors; None: no bound
    num_inferencers: int = 1  # services, of light_env and distributed
    num_pools: int = 1  # of each actor's environments; of 2 one steps while a service answers for the other
    replay: Replay = "auto"  # where experience lies; auto: as the topology is meant
    engine: EngineName = "launchpad"  # what runs the nodes of a topology; threads: all in this process
    max_restarts: int = 3  # how often each node of the engine launchpad may die and be started again
    hang_timeout: float = TIMEOUT  # seconds without a heartbeat after which a node is killed; 0: none that hangs is
    grace_seconds: float = GRACE  # that nodes have to save and end, once they are told to, before they are killed
    env_type: EnvType = "auto"  # how the pool runs; auto: the quickest, envpool or loop (process, if async)
    num_workers: Union[int, None] = None  # threads or processes of the pool; None: as many as there are cores
    async_envs: bool = False  # act on the environments that answer first; not for agents that learn on-policy
    wait_num: Union[int, None] = None  # of async_envs: environments of each pool to wait for; None: a third of them
    answer_timeout: float = 600.0  # seconds that an environment may take for a step before it counts as hung
    check_finite: Union[bool, None] = None  # whether NaN of an environment ends the run; None: unless it is EnvPool's
    env_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)  # options of the environment itself
    eval_env_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)  # changes to them for evaluation
    network: Union[str, None] = None  # mlp, nature_cnn or file.py:make_net; None: what suits the observation
    eval_every: int = 0  # environment steps between two evaluations; 0: only the one at the end
    eval_episodes: int = 20
    # environment steps between two checkpoints; 0: only when the run stops. (A topology of several processes
    # saves every 30 s in any case: its learner may die, and must not begin anew.)
    checkpoint_every: int = 100_000
    replay_checkpoint_every: int = 1_000_000  # of a single process: the same for a replay too large to go into each
    schedule_steps: int = 0  # environment steps at which schedules end; 0: `steps`. A resumed run keeps its first
    log_every: int = 0  # environment steps between two rows of the logs; 0: a 100th of the run, 10,000 at most
    agent_config: Any = None
    network_config: Any = None

    def __post_init__(self) -> None:
        for least, names in _AT_LEAST.items():
            for name in names.split():
                value = getattr(self, name)
                if value is not None and value < least:
                    raise UsageError(f"{name} must be at least {least}, got {value}.")
        if not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"seed must be between 0 and {MAX_SEED}, got {self.seed}.")
        if not self.answer_timeout > 0:
            raise UsageError(f"answer_timeout must be more than 0 s, got {self.answer_timeout}.")

        for name in ("mean_staleness", "until_learner_steps", "until_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name} must be more than 0, got {value}.")
        if self.until_return is not None and self.topology == "elastic" and not self.eval_every:
            raise UsageError(
                "until_return is of evaluations during the run: say by eval_every how often there are some."
            )
        self._check_is_read()
        if self.max_actors < self.min_actors:
            raise UsageError(f"max_actors must be at least min_actors, got {self.max_actors} and {self.min_actors}.")
        shares = 1 if self.topology == "single_process" else self.num_actors * self.num_pools
        if self.num_envs % shares:
            raise UsageError(
                f"num_envs={self.num_envs} cannot be shared evenly by num_actors={self.num_actors} with num_pools="
                f"{self.num_pools} each. Give num_envs a multiple of {shares}."
            )
        self._check_async()
        kinds = _REPLAYS[self.topology]
        if self.replay not in ("auto", *kinds):
            raise UsageError(
                f"The topology {self.topology} keeps its experience in {' or '.join(kinds)}, "
                f"got replay={self.replay!r}."
            )

    def _check_is_read(self) -> None:
        for name, topologies in _READ_BY.items():
            value, default = getattr(self, name), getattr(Experiment, name)
            if value != default and self.topology not in topologies:
                raise UsageError(
                    f"{name}={value!r} is for the topology {' or '.join(topologies)}: {self.topology} does not read "
                    f"it. Leave it at {default!r}, or choose another topology."
                )
        check_engine_reads(self)

    def _check_async(self) -> None:
        if self.wait_num is not None and not self.async_envs:
            raise UsageError(f"wait_num={self.wait_num} is for asynchronous environments: add --async (async_envs).")
        if self.async_envs and self.env_type == "loop":
            raise UsageError(
                "A loop steps its environments one after another, so none of them can answer before the others: "
                "use env_type thread, process or envpool with --async (async_envs)."
            )
        if not 1 <= self.waits_for <= self.envs_per_pool:
            raise UsageError(
                f"wait_num must be between 1 and {self.envs_per_pool}, the environments of a pool, got {self.wait_num}."
            )

    @property
    def synchronous(self) -> Experiment:
        """The same with all environments of a pool in step, as evaluations need them."""
        return dataclasses.replace(self, async_envs=False, wait_num=None)

    @property
    def waits_for(self) -> int:
        """Environments of a pool that an actor waits for: all, unless they are asynchronous."""
        if not self.async_envs:
            return self.envs_per_pool
        return -(-self.envs_per_pool // 3) if self.wait_num is None else self.wait_num

    @property
    def envs_per_actor(self) -> int:
        """Environments of each actor."""
        return self.num_envs if self.topology == "single_process" else self.num_envs // self.num_actors

    @property
    def envs_per_pool(self) -> int:
        """Environments of each of an actor's pools."""
        return self.envs_per_actor // self.num_pools

    @property
    def replay_kind(self) -> str:
        """Where experience lies: local, shared_memory or reverb."""
        return _REPLAYS[self.topology][0] if self.replay == "auto" else self.replay

    @property
    def row_every(self) -> int:
        """Environment steps between two rows of the logs."""
        return self.log_every or min(max(self.steps // 100, 1), 10_000)


def check_engine_reads(described: Any) -> None:
    """Raises UsageError where an experiment tells its engine what that does not read."""
    read = naming.engine_class(described.engine).options
    for name in ("max_restarts", "hang_timeout", "grace_seconds"):
        value, default = getattr(described, name), getattr(Experiment, name)
        if value != default and name not in read:
            by = [each for each in naming.ENGINES if name in naming.engine_class(each).options]
            raise UsageError(
                f"{name}={value} is for the engine {' or '.join(by)}: the engine {described.engine} does not read it. "
                f"Leave it at {default}, or choose another engine."
            )


def peer_deadline(described: Any) -> float:
    """Seconds for which a node of the experiment's program waits for another: for ever where none may hang for ever."""
    watched = "hang_timeout" in naming.engine_class(described.engine).options and described.hang_timeout > 0
    return math.inf if watched else handles.DEADLINE


def make_experiment(
    agent: str = "ppo",
    env: str = "CartPole-v1",
    *,
    preset: str = "auto",
    agent_config: Any = None,
    network_config: Any = None,
    **fields: Any,
) -> Experiment:
    """An `Experiment` with the preset of its agent and environment filled in.

    Args:
        agent: a name or `file.py:Class`.
        env: a name or `file.py:make_env`.
        preset: "auto" (the one that fits, if any), "none", or a preset's name.
        agent_config: the agent's whole config; then no preset is applied to it.
        network_config: the named network's whole config.
        **fields: fields of `Experiment`, and of the agent's config, that differ from the preset.

    Raises:
        UsageError: a name or field is unknown.
    """
    agent_cls = naming.agent_class(agent)
    found = find_preset(preset, agent, env)
    own = {field.name for field in dataclasses.fields(experiment_class(agent))}
    of_agent = {field.name for field in dataclasses.fields(agent_cls.config_cls)}  # type: ignore[attr-defined]
    for name in fields:
        if name not in own | of_agent:
            raise UsageError(
                f"There is no field {name!r} in an experiment with {agent}.{suggest(name, own | of_agent)}"
            )
    defaults = with_preset(found, agent, env)
    values = {name: value for name, value in fields.items() if name in own}
    if "network" in values and values["network"] != defaults.network:
        values["network_config"] = None
    result = dataclasses.replace(defaults, **values)
    changes = {name: value for name, value in fields.items() if name not in own}
    config = dataclasses.replace(agent_config if agent_config is not None else result.agent_config, **changes)
    result = dataclasses.replace(result, agent_config=config)
    if network_config is not None:
        result = dataclasses.replace(result, network_config=network_config)
    return complete(result)


def experiment_class(agent: str) -> Any:
    """What describes a run of an agent: `Experiment`, or `rlframe.programs.language.LanguageExperiment`."""
    if not naming.agent_class(agent).learns_language:  # type: ignore[attr-defined]
        return Experiment
    from rlframe.programs.language.description import LanguageExperiment

    return LanguageExperiment


def with_preset(preset: Preset | None, agent: str, env: str) -> Any:
    """The defaults of an agent on an environment, changed as the preset says."""
    config_cls = naming.agent_class(agent).config_cls  # type: ignore[attr-defined]
    cls = experiment_class(agent)
    if preset is None:
        return complete(cls(agent=agent, env=env))
    if cls is not Experiment:
        config = config_cls(**preset.values("agent"))
        return cls(agent=agent, env=env, agent_config=config, **preset.values("run"))
    network = preset.fields.get("network")
    network_cls = naming.network_config_class(network.value if network is not None else None)
    return Experiment(
        agent=agent,
        env=env,
        agent_config=config_cls(**preset.values("agent")),
        network_config=network_cls(**preset.values("network")) if network_cls is not None else None,
        **preset.values("run"),
    )


def complete(described: Any) -> Any:
    """`described` with `agent_config` and `network_config` at their defaults where they are None."""
    if described.agent_config is None:
        config_cls = naming.agent_class(described.agent).config_cls  # type: ignore[attr-defined]
        described = dataclasses.replace(described, agent_config=config_cls())
    if isinstance(described, Experiment) and described.network_config is None:
        network_cls = naming.network_config_class(described.network)
        if network_cls is not None:
            described = dataclasses.replace(described, network_config=network_cls())
    return described


# What a resumed run may change: none of it reaches the numbers, but `steps`, whose schedules are kept.
_CHANGEABLE = {"steps", "schedule_steps", "num_workers", "eval_every", "eval_episodes", "log_every"}
_CHANGEABLE |= {"engine", "max_restarts", "hang_timeout", "grace_seconds"}
_CHANGEABLE |= {"checkpoint_every", "replay_checkpoint_every", "answer_timeout", "check_finite"}
_CHANGEABLE |= {"min_actors", "mean_staleness", "until_learner_steps", "until_seconds", "until_return"}
_CHANGEABLE |= {"slots", "service_port", "policy_port"}  # of a `LanguageExperiment`


def continued(saved: Any, wanted: Any) -> Any:
    """The experiment of a resumed run: `wanted`, with the schedules of `saved`.

    Raises:
        UsageError: they differ in what a run cannot change in its middle.
    """
    for field in dataclasses.fields(saved):
        if field.name in _CHANGEABLE:
            continue
        before, now = to_jsonable(getattr(saved, field.name)), to_jsonable(getattr(wanted, field.name))
        if field.name in ("agent", "env", "network") and now is not None:
            now = naming.absolute_name(now)
        if now != before:
            name, before, now = _first_difference(field.name, before, now)
            raise UsageError(
                f"The run was started with {name} = {before!r}; a resumed run cannot change it to {now!r}. "
                "Start a new run, with --config RUN_DIR/config.json for the rest."
            )
    if not isinstance(saved, Experiment):
        return wanted
    return dataclasses.replace(wanted, schedule_steps=saved.schedule_steps or saved.steps)


def _first_difference(name: str, before: Any, now: Any) -> tuple[str, Any, Any]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            if before.get(key) != now.get(key):
                return key, before.get(key), now.get(key)
    return name, before, now


def total_learner_steps(spec: ReplaySpec, steps: int, num_envs: int) -> int:
    """How many updates a run of `steps` environment steps makes: where schedules end.

    Steps whose action is ignored (after an episode's end) are items too, and are not counted here.
    """
    period = spec.item.period if isinstance(spec.item, Sequence) else 1
    items = steps / period
    if spec.samples_per_insert is None:
        return max(1, int(items / (spec.batch_size or num_envs)))
    waits = min(spec.min_size, items)
    return max(1, int((items - waits) * spec.samples_per_insert / (spec.batch_size or num_envs)))


def save_experiment(described: Any, path: pathlib.Path, notes: dict[str, Any]) -> None:
    """Writes `config.json` in one piece: the experiment, and `notes` that nothing reads back (versions, preset)."""
    values = to_jsonable(described)
    for name in ("agent", "env", "network"):
        if values.get(name) is not None:
            values[name] = naming.absolute_name(values[name])
    content = {"experiment": values, "notes": to_jsonable(notes)}
    write_atomically(path, json.dumps(content, indent=2), "\n")


def load_experiment(path: str | pathlib.Path) -> Any:
    """Reads `config.json` of a run directory.

    Raises:
        UsageError: there is no such file, it is no JSON, or a field in it is unknown or of a wrong type.
    """
    path = pathlib.Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}. Name the config.json of a run directory.") from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict) or not isinstance(content.get("experiment"), dict):
        raise UsageError(f'{path} is no config of a run: it must hold {{"experiment": {{...}}}}.')
    values = dict(content["experiment"])
    agent_values, network_values = values.pop("agent_config", None), values.pop("network_config", None)
    agent = values.get("agent")
    cls = experiment_class(agent) if isinstance(agent, str) else Experiment
    described = from_jsonable(cls, values, f"{path}: experiment")
    config_cls = naming.agent_class(described.agent).config_cls  # type: ignore[attr-defined]
    if agent_values is not None:
        agent_values = from_jsonable(config_cls, agent_values, f"{path}: agent_config")
    if not isinstance(described, Experiment):
        return complete(dataclasses.replace(described, agent_config=agent_values))
    network_cls = naming.network_config_class(described.network)
    if network_cls is not None and network_values is not None:
        network_values = from_jsonable(network_cls, network_values, f"{path}: network_config")
    return complete(dataclasses.replace(described, agent_config=agent_values, network_config=network_values))
