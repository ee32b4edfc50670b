"""Base classes for the options of topologies.

An option is a field of a dataclass. A class `...Options` is a group of options that the same code reads. Each topology
has one config class, which inherits from the groups of its options.

    TopologyConfig                                    every topology
      EnvOptions  AgentOptions                        groups for games
      EvaluationOptions  StoppingOptions
        GameConfig                                    all four groups, and the replay   SingleProcess
      ProgramConfig                                   several nodes, and their engine   Language
        GameProgram(ProgramConfig, GameConfig)        games with several nodes          HeavyEnv, LightEnv, Elastic

The right column shows the config classes of the built-in topologies. Each is in the same file as the topology's
function. `configured_by` connects the two.

A game is any environment whose steps an agent learns from, for example a robot or a pendulum. Language models are the
other kind: their agents learn from trajectories (`TopologyConfig.learns_from`).

A config has the fields of all its base classes. `--topology heavy_env --network lstm --until-return 475` sets the
fields `network` (from `AgentOptions`) and `until_return` (from `StoppingOptions`) of a `HeavyEnv`.

Code that supports only some topologies reads options through the class that defines them:
`AgentOptions.of(experiment).network`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, Union

from rlframe.engines.base import GRACE, NodeOptions, RunsReverb
from rlframe.errors import UsageError, check_at_least
from rlframe.programs.options import registry
from rlframe.programs.options.fields import check_numbers, option, parse_ids
from rlframe.stop_conditions import StopConditions

if TYPE_CHECKING:
    from rlframe.engines.base import Engine
    from rlframe.programs.experiment import Experiment

# A function (engine, session) that adds the nodes of a program to an engine. It returns None, or the topology of a
# second program to run after the first program. Only `language` returns a topology, after the supervised warm-up.
Topology = Callable[[Any, Any], Any]

INLINE = "rlframe.engines.threads:InlineEngine"
EnvType = Literal["auto", "loop", "thread", "process", "envpool", "jax"]
Function = TypeVar("Function", bound=Callable[..., Any])
Config = TypeVar("Config", bound="TopologyConfig")


def configured_by(config_cls: type[TopologyConfig]) -> Callable[[Function], Function]:
    """Decorator that connects a topology function with the dataclass of its options."""

    def mark(function: Function) -> Function:
        function.config_cls = config_cls  # type: ignore[attr-defined]
        return function

    return mark


@dataclasses.dataclass(frozen=True)
class TopologyConfig:
    """The base class of all topology options. Its options are the name, the devices of the learner and the precision.

    Each property returns a default. If a subclass has an option for this value, it overrides the property.

    Attributes:
        learns_from: The supported agents are those with the same `Agent.learns_from`: "steps" of environments, or
            "trajectories" of a language model.
        control_group: Node group that shows and controls the run over HTTP. None means that the launcher does it.
        unit: Unit of the run's steps.
        defaults: Default values of `Experiment` fields that differ for this topology.
        can_profile: True if `--profile` can measure the parts of a run.
        hidden: Names of inherited options that have only one valid value. `--help` does not show them.
        joins_seeds: True if `run_seeds` can run several seeds in one process.
        help_group: Title of the options in `rlframe train --help`.
    """

    learns_from: ClassVar[str] = "steps"
    control_group: ClassVar[str | None] = None
    unit: ClassVar[str] = "env steps"
    defaults: ClassVar[dict[str, Any]] = {}
    can_profile: ClassVar[bool] = False
    hidden: ClassVar[tuple[str, ...]] = ()
    joins_seeds: ClassVar[bool] = False
    help_group: ClassVar[str] = "Processes"

    name: str = ""  # Name on the command line.
    learner_devices: int = option(1, at_least=1, changeable=True)  # Number of devices that share each update.
    matmul_precision: Literal["default", "high", "highest"] = "default"  # Matrix products on accelerators.

    @property
    def engine_name(self) -> str:
        """The engine: a name or `file.py:Class`. By default, the only node runs in this thread."""
        return INLINE

    @property
    def engine_class(self) -> type[Engine]:
        """The class of the engine that runs the nodes."""
        return registry.engine_class(self.engine_name)

    @property
    def grace_seconds(self) -> float:
        """Seconds that the nodes have to save and end before they are killed."""
        return GRACE

    @property
    def kills_hung_nodes(self) -> bool:
        """True if the launcher kills nodes that hang. In this case, nodes wait for each other without a time limit."""
        return False

    @property
    def evaluates(self) -> bool:
        """True if the policy is evaluated."""
        return True

    @property
    def stop_conditions(self) -> StopConditions:
        """The limits that can end a session before its last step."""
        return StopConditions()

    @classmethod
    def of(cls: type[Config], experiment: Experiment) -> Config:
        """Return the experiment's `topology_config`, which must be an instance of this class."""
        config = experiment.topology_config
        assert isinstance(config, cls), f"The options of {config.name} are not a {cls.__name__}."
        return config

    def __post_init__(self) -> None:
        check_numbers(self)

    def check(self, experiment: Experiment) -> None:
        """Raise UsageError if these options conflict with the rest of the experiment."""

    def warm_up_steps(self, experiment: Experiment) -> int:
        """Return the number of supervised updates before the steps of the experiment. Log rows count them too."""
        return 0

    def requires(self, experiment: Experiment) -> list[str]:
        """Return the extras that a run needs in addition to those of its engine."""
        return []

    def extras_option(self, experiment: Experiment) -> str:
        """Return the option because of which a run needs the extras of `requires`. Error messages contain it."""
        return f"--topology {self.name}"


@dataclasses.dataclass(frozen=True)
class ProgramConfig(NodeOptions, TopologyConfig):
    """Options of a topology with several nodes: the engine and its options."""

    # Engine that runs the nodes: local, launchpad, ray, threads (all in this process), or file.py:Class.
    engine: str = option("auto", changeable=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "max_restarts", "hang_timeout", "grace_seconds")
        read = self.engine_class.options
        for name, value in self.node_options.items():
            default = getattr(NodeOptions, name)
            if value != default and name not in read:
                by = [each for each in registry.ENGINES if name in registry.engine_class(each).options]
                raise UsageError(
                    f"{name}={value} is for the engine {' or '.join(by)}: {self.engine_name} does not read it. "
                    f"Leave it at {default}, or choose another engine."
                )

    @property
    def engine_name(self) -> str:
        """See `TopologyConfig`. The default engine runs processes on this machine."""
        return "local" if self.engine == "auto" else self.engine

    @property
    def node_options(self) -> dict[str, Any]:
        """The options of the engine as a dict: name -> value."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(NodeOptions)}

    @property
    def kills_hung_nodes(self) -> bool:
        """See `TopologyConfig`."""
        return self.hang_timeout > 0 and "hang_timeout" in self.engine_class.options


# --- groups of options for games


@dataclasses.dataclass(frozen=True)
class EnvOptions(TopologyConfig):
    """Options of the environments. `makers.make_pool` reads them."""

    help_group: ClassVar[str] = "Environment"
    env_type: EnvType = "auto"  # Environment pool; auto is the fastest
    # Threads or processes that step environments. None means one per core.
    num_workers: Union[int, None] = option(None, at_least=1, changeable=True)
    async_envs: bool = False  # Act on the environments that answer first; not on-policy.
    wait_num: Union[int, None] = None  # With --async: environments to wait for. None means a third.
    answer_timeout: float = option(600.0, above=0, changeable=True)  # Seconds after which a step counts as hung.
    # Stop at NaN or infinity. None means yes, except for EnvPool.
    check_finite: Union[bool, None] = option(None, changeable=True)
    frame_stack: int = option(1, at_least=1)  # Number of newest observations to stack.
    action_repeat: int = option(1, at_least=1)  # Times to repeat each action, as one environment step.
    action_mask: Union[str, None] = "action_mask"  # Key of the mask in a dict observation. None: no mask.
    clip_rewards: Union[float, None] = option(None, above=0)  # Clip training rewards to +/- this value. None: never.

    @property
    def num_actors(self) -> int:
        """Number of actors that share the environments."""
        return 1

    @property
    def num_pools(self) -> int:
        """Number of pools per actor."""
        return 1

    def check(self, experiment: Experiment) -> None:
        """See `TopologyConfig`."""
        super().check(experiment)
        if self.wait_num is not None and not self.async_envs:
            raise UsageError(f"wait_num={self.wait_num} is for asynchronous environments: add --async (async_envs).")
        if self.async_envs and self.env_type in ("loop", "jax"):
            order = "one after another" if self.env_type == "loop" else "all together"
            raise UsageError(
                f"The env_type {self.env_type} steps environments {order}, so it cannot be asynchronous. "
                "Use env_type thread, process or envpool with --async (async_envs)."
            )
        num_pools = self.num_actors * self.num_pools
        if experiment.num_envs % num_pools:
            raise UsageError(
                f"num_envs={experiment.num_envs} cannot be shared evenly by num_actors={self.num_actors} with "
                f"num_pools={self.num_pools} each. Set num_envs to a multiple of {num_pools}, or change num_actors."
            )
        if not 1 <= experiment.num_awaited_envs <= experiment.envs_per_pool:
            raise UsageError(
                f"wait_num must be between 1 and {experiment.envs_per_pool}, the number of environments per pool, got "
                f"{self.wait_num}."
            )


@dataclasses.dataclass(frozen=True)
class AgentOptions(TopologyConfig):
    """Options of the agent that are not in its config: network and normalization."""

    help_group: ClassVar[str] = "Agent"
    network: Union[str, None] = None  # mlp, nature_cnn, lstm, gru or file.py:make_net. None: by the env.
    network_config: Any = None  # Options of a named network.
    normalize_observations: bool = False  # Subtract the running mean, divide by the deviation.
    observation_clip: float = option(10.0, above=0)  # Limit of normalized observations, in deviations.
    normalize_rewards: bool = False  # Divide by the running deviation of the return.
    reward_clip: float = option(10.0, above=0)  # Limit of normalized rewards.


@dataclasses.dataclass(frozen=True)
class EvaluationOptions(TopologyConfig):
    """Options of evaluations, both final and during training (`eval_every`). `policies/evaluation.py` reads them."""

    help_group: ClassVar[str] = "Run"
    eval_env_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)  # Changes --env-kwargs in evaluations.
    eval_episodes: int = option(20, at_least=0, changeable=True)  # Episodes per evaluation. 0 means no evaluation.
    # Environments per evaluation. None means one per episode.
    eval_num_envs: Union[int, None] = option(None, at_least=1, changeable=True)
    eval_max_episode_length: int = option(108_000, at_least=1, changeable=True)  # Longest evaluation episode, in steps.

    @property
    def evaluates(self) -> bool:
        """See `TopologyConfig`."""
        return self.eval_episodes > 0

    def check(self, experiment: Experiment) -> None:
        """See `TopologyConfig`."""
        super().check(experiment)
        if experiment.eval_every and not self.eval_episodes:
            raise UsageError(
                f"eval_every={experiment.eval_every} requests evaluations during the run, but eval_episodes=0 turns "
                "evaluations off. Set eval_every=0 as well, or set eval_episodes."
            )


@dataclasses.dataclass(frozen=True)
class StoppingOptions(TopologyConfig):
    """The limits that end a run before its last step."""

    help_group: ClassVar[str] = "Run"
    until_learner_steps: Union[int, None] = option(None, above=0, changeable=True)  # End after this number of updates.
    # End the run after this wall time of the session, in seconds.
    until_seconds: Union[float, None] = option(None, above=0, changeable=True)
    until_return: Union[float, None] = option(None, changeable=True)  # End when an evaluation reaches this mean return.

    @property
    def stop_conditions(self) -> StopConditions:
        """See `TopologyConfig`."""
        return StopConditions(
            learner_steps=self.until_learner_steps, seconds=self.until_seconds, eval_return=self.until_return
        )

    def check(self, experiment: Experiment) -> None:
        """See `TopologyConfig`."""
        super().check(experiment)
        if self.until_return is not None and math.isnan(self.until_return):
            raise UsageError("until_return must be a number, got nan.")
        if self.until_return is not None and not experiment.eval_every:
            raise UsageError(
                "until_return needs evaluations during the run. Set eval_every to the number of steps between them."
            )


@dataclasses.dataclass(frozen=True)
class GameConfig(StoppingOptions, EvaluationOptions, AgentOptions, EnvOptions):
    """Options of a topology for games: environments, agent, evaluation, limits and the replay buffer.

    Attributes:
        replays: Names of the supported replay buffers. The first one is the default.
        accepts_custom_replay: True if the replay buffer can also be a `file.py:Class`.
    """

    replays: ClassVar[tuple[str, ...]] = ("shared_memory", "service", "reverb")
    accepts_custom_replay: ClassVar[bool] = True
    help_group: ClassVar[str] = "Processes"

    replay: str = "auto"  # Replay buffer, or file.py:Class

    def __post_init__(self) -> None:
        super().__post_init__()
        is_own = self.accepts_custom_replay and ":" in self.replay
        if self.replay not in ("auto", *self.replays) and not is_own:
            own = "A custom replay buffer is file.py:Class." if self.accepts_custom_replay else "It supports no other."
            raise UsageError(
                f"The topology {self.name} needs replay={' or '.join(self.replays)}, got {self.replay!r}. {own}"
            )

    @property
    def replay_kind(self) -> str:
        """The kind of replay buffer: local, shared_memory, service, reverb, or a `file.py:Class`."""
        return self.replays[0] if self.replay == "auto" else self.replay

    def requires(self, experiment: Experiment) -> list[str]:
        """See `TopologyConfig`."""
        return ["reverb"] if self.replay_kind == "reverb" else []

    def extras_option(self, experiment: Experiment) -> str:
        """See `TopologyConfig`."""
        return super().extras_option(experiment) + (" --replay reverb" if self.replay == "reverb" else "")


@dataclasses.dataclass(frozen=True)
class GameProgram(ProgramConfig, GameConfig):
    """Options of a topology for games with several nodes, whose actors share the environments."""

    num_actors: int = option(2, at_least=1)  # Number of actors. With elastic: number of actors at the start.
    replay_shards: int = option(1, at_least=1)  # With --replay service: number of services that share the replay.
    # With --engine threads: devices that act, such as 0 or 0,1. Actors (or inference services) take turns.
    actor_device_ids: Union[str, None] = option(None, changeable=True)
    # With --engine threads: devices that share each update, such as 1-3, instead of --learner-devices.
    learner_device_ids: Union[str, None] = option(None, changeable=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen = [name for name in ("actor_device_ids", "learner_device_ids") if getattr(self, name) is not None]
        for name in chosen:
            parse_ids(name, getattr(self, name))
        if chosen and not self.engine_class.in_process:
            raise UsageError(
                f"{chosen[0]} is for --engine threads, which runs all nodes in one process. The engine "
                f"{self.engine_name} gives devices to groups of nodes: use --accelerators."
            )
        if self.learner_device_ids is not None and self.learner_devices > 1:
            raise UsageError("learner_device_ids and learner_devices both choose the learner's devices. Give only one.")
        if self.replay_shards != 1 and self.replay_kind != "service":
            raise UsageError(
                f"replay_shards={self.replay_shards} is for --replay service: {self.replay_kind} has no shards. Leave "
                "it at 1, or use --replay service."
            )
        if self.replay_kind == "reverb" and not issubclass(self.engine_class, RunsReverb):
            others = " or ".join(f"--replay {kind}" for kind in self.replays if kind != "reverb")
            raise UsageError(
                f"The engine {self.engine_name} cannot run a Reverb server. Use {others}, or another engine."
            )


def find_topology(name: str, learns_from: str = "steps") -> Topology:
    """Find the function of a topology by name or `file.py:function`.

    Raises:
        UsageError: There is no such topology for agents that learn from `learns_from`.
    """
    found = registry.find(name, registry.TOPOLOGIES[learns_from], "topology", "file.py:function")
    if not callable(found):
        raise UsageError(f"A topology must be a function (engine, session), but {name} is {found!r}.")
    needed = config_class_of(found).learns_from
    if needed != learns_from:
        raise UsageError(
            f"The topology {name} is for agents that learn from {needed}. This agent learns from {learns_from}."
        )
    return found


def config_class_of(topology: Topology) -> type[TopologyConfig]:
    """Return the dataclass of a topology's options: the argument of `configured_by`, or `GameProgram` by default."""
    return getattr(topology, "config_cls", GameProgram)
