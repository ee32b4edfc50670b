"""Options of topologies: a dataclass for each topology, made of the classes here.

An option is a field. A class `...Options` is a group of options that the same code reads. A config is all options of a
topology: a dataclass that inherits the groups which the topology has.

    TopologyConfig                                    every topology
      EnvOptions  AgentOptions                        groups, of games: each has its limits and checks
      EvaluationOptions  StoppingOptions
        GameConfig                                    all four groups, and the replay   SingleProcess
      ProgramConfig                                   several nodes, and their engine   Language
        GameProgram(ProgramConfig, GameConfig)        games in several nodes            HeavyEnv, LightEnv, Elastic

On the right are the configs of our topologies, each beside the function that wires its nodes: `configured_by` joins
the two.

A game is any environment whose steps an agent learns from, a robot's or a pendulum's as well; the other kind are the
environments of language models, whose agents learn from trajectories (`TopologyConfig.learns_from`).

The fields of all bases lie side by side: `--topology heavy_env --network lstm --until-return 475` sets the fields
`network` (of `AgentOptions`) and `until_return` (of `StoppingOptions`) of a `HeavyEnv`.

Code for some topologies only reads options through the class that has them: `AgentOptions.of(experiment).network`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, Union

from rlframe.engines.base import GRACE, NodeOptions, RunsReverb
from rlframe.errors import UsageError, check_at_least
from rlframe.programs.options import registry
from rlframe.programs.options.fields import check_numbers, number
from rlframe.stop_conditions import StopConditions

if TYPE_CHECKING:
    from rlframe.engines.base import Engine
    from rlframe.programs.experiment import Experiment

# A function (engine, session) that adds the nodes of a program to an engine. It returns None, or the topology of a
# second program, which runs after the first one has ended well: only language does, after its warm-up.
Topology = Callable[[Any, Any], Any]

INLINE = "rlframe.engines.inline:InlineEngine"
EnvType = Literal["auto", "loop", "thread", "process", "envpool"]
Function = TypeVar("Function", bound=Callable[..., Any])
Config = TypeVar("Config", bound="TopologyConfig")


def configured_by(config_cls: type[TopologyConfig]) -> Callable[[Function], Function]:
    """Set the dataclass of a topology's options: a decorator of the function that wires it."""

    def mark(function: Function) -> Function:
        function.config_cls = config_cls  # type: ignore[attr-defined]
        return function

    return mark


@dataclasses.dataclass(frozen=True)
class TopologyConfig:
    """Options of every topology: none but its name. The properties have the values of a topology without the option.

    Attributes:
        learns_from: the agents that it is for, by their `Agent.learns_from`: steps (of environments, games or not) or
            trajectories (of a language model).
        control_group: the group of the node whose HTTP service shows and controls the run; None: the launcher's does.
        unit: what the steps of a run are.
        defaults: of fields of `Experiment`, where the topology has others.
    """

    learns_from: ClassVar[str] = "steps"
    control_group: ClassVar[str | None] = None
    unit: ClassVar[str] = "env steps"
    defaults: ClassVar[dict[str, Any]] = {}

    name: str = ""  # as the command line has it

    @property
    def engine_name(self) -> str:
        """The engine, a name or `file.py:Class`. Without an option for it, the one node runs in this thread."""
        return INLINE

    @property
    def engine_class(self) -> type[Engine]:
        """The class that runs its nodes."""
        return registry.engine_class(self.engine_name)

    @property
    def grace_seconds(self) -> float:
        """Seconds that the nodes have to save and end."""
        return GRACE

    @property
    def kills_hung_nodes(self) -> bool:
        """True if nodes that hang are killed: then other nodes wait for them without a limit."""
        return False

    @property
    def evaluates(self) -> bool:
        """True if the policy is evaluated."""
        return True

    @property
    def stop_conditions(self) -> StopConditions:
        """The limits that may end a session before its last step."""
        return StopConditions()

    @classmethod
    def of(cls: type[Config], experiment: Experiment) -> Config:
        """Return the `topology_config` of an experiment whose topology has the options of this class."""
        config = experiment.topology_config
        assert isinstance(config, cls), f"The options of {config.name} are no {cls.__name__}."
        return config

    def __post_init__(self) -> None:
        check_numbers(self)

    def check(self, experiment: Experiment) -> None:
        """Raise UsageError if these options do not fit the rest of the experiment."""

    def warm_up_steps(self, experiment: Experiment) -> int:
        """Supervised updates before the run, which rows count before those of `experiment.steps`."""
        return 0

    def requires(self, experiment: Experiment) -> list[str]:
        """Return the extras that a run needs beside those of its engine."""
        return []

    def extras_option(self, experiment: Experiment) -> str:
        """Return the option that needs these extras, for an error."""
        return f"--topology {self.name}"


@dataclasses.dataclass(frozen=True)
class ProgramConfig(NodeOptions, TopologyConfig):
    """Options of a topology of several nodes: the engine that runs them, and its own options."""

    # What runs the nodes: local, launchpad, ray, threads (all in this process), or file.py:Class.
    engine: str = "auto"

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
        """See `TopologyConfig`: processes of this machine, unless another engine is asked for."""
        return "local" if self.engine == "auto" else self.engine

    @property
    def node_options(self) -> dict[str, Any]:
        """The options of its engine, by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(NodeOptions)}

    @property
    def kills_hung_nodes(self) -> bool:
        """See `TopologyConfig`."""
        return self.hang_timeout > 0 and "hang_timeout" in self.engine_class.options


# --- options of games, in groups


@dataclasses.dataclass(frozen=True)
class EnvOptions(TopologyConfig):
    """Options of the environments: `makers.make_pool` reads these."""

    env_type: EnvType = "auto"  # how the pool runs; auto: the quickest, envpool or loop (process, if async)
    # threads or processes of the pool; None: as many as there are cores
    num_workers: Union[int, None] = number(None, at_least=1)
    async_envs: bool = False  # act on the environments that answer first; not for agents that learn on-policy
    wait_num: Union[int, None] = None  # of async_envs: environments of each pool to wait for; None: a third of them
    # seconds that an environment may take for a step before it counts as hung
    answer_timeout: float = number(600.0, above=0)
    check_finite: Union[bool, None] = None  # whether NaN of an environment ends the run; None: unless it is EnvPool's
    frame_stack: int = number(1, at_least=1)  # observations that each one is made of: its own and those before
    # how often each action is taken, up to an episode's end; counts as one environment step
    action_repeat: int = number(1, at_least=1)
    # to between minus this and this, in training; None: as they are
    clip_rewards: Union[float, None] = number(None, above=0)

    @property
    def num_actors(self) -> int:
        """Actors that share the environments."""
        return 1

    @property
    def num_pools(self) -> int:
        """Pools that share the environments of each actor."""
        return 1

    def check(self, experiment: Experiment) -> None:
        """See `TopologyConfig`."""
        super().check(experiment)
        if self.wait_num is not None and not self.async_envs:
            raise UsageError(f"wait_num={self.wait_num} is for asynchronous environments: add --async (async_envs).")
        if self.async_envs and self.env_type == "loop":
            raise UsageError(
                "A loop steps its environments one after another, so none of them can answer before the others: "
                "use env_type thread, process or envpool with --async (async_envs)."
            )
        num_pools = self.num_actors * self.num_pools
        if experiment.num_envs % num_pools:
            raise UsageError(
                f"num_envs={experiment.num_envs} cannot be shared evenly by num_actors={self.num_actors} with "
                f"num_pools={self.num_pools} each. Give num_envs a multiple of {num_pools}, or change num_actors."
            )
        if not 1 <= experiment.num_awaited_envs <= experiment.envs_per_pool:
            raise UsageError(
                f"wait_num must be between 1 and {experiment.envs_per_pool}, the environments of a pool, got "
                f"{self.wait_num}."
            )


@dataclasses.dataclass(frozen=True)
class AgentOptions(TopologyConfig):
    """The agent's network, normalization and schedules, beside its own config: `makers.make_agent` reads these."""

    network: Union[str, None] = None  # mlp, nature_cnn, lstm, gru or file.py:make_net; None: what suits the observation
    network_config: Any = None  # the options of a named network
    normalize_observations: bool = False  # by their running mean and deviation (rlframe.agents.Normalized)
    observation_clip: float = number(10.0, above=0)  # deviations from the mean, where they are normalized
    normalize_rewards: bool = False  # by the deviation of the discounted return so far; for agents of sequences
    reward_clip: float = number(10.0, above=0)  # where they are
    # environment steps at which schedules end; 0: `steps`. A resumed run keeps its first
    schedule_steps: int = number(0, at_least=0)


@dataclasses.dataclass(frozen=True)
class EvaluationOptions(TopologyConfig):
    """How the policy is evaluated, at the end and at each `eval_every`: `policies/evaluation.py` reads these."""

    eval_env_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)  # changes to env_kwargs for evaluation
    # episodes of an evaluation; 0: no evaluation, neither after training nor during it
    eval_episodes: int = number(20, at_least=0)
    # environments of an evaluation; None: one for each of its episodes
    eval_num_envs: Union[int, None] = number(None, at_least=1)
    # most steps of an episode of an evaluation; more are an error
    eval_max_episode_length: int = number(108_000, at_least=1)

    @property
    def evaluates(self) -> bool:
        """See `TopologyConfig`."""
        return self.eval_episodes > 0

    def check(self, experiment: Experiment) -> None:
        """See `TopologyConfig`."""
        super().check(experiment)
        if experiment.eval_every and not self.eval_episodes:
            raise UsageError(
                f"eval_every={experiment.eval_every} asks for evaluations during the run, and eval_episodes=0 turns "
                "evaluations off. Set eval_every=0 as well, or give a number of episodes."
            )


@dataclasses.dataclass(frozen=True)
class StoppingOptions(TopologyConfig):
    """The limits at which a run ends before its last step."""

    until_learner_steps: Union[int, None] = number(None, above=0)  # updates at which the run ends, if not before
    # wall time of this session at which the run ends, if not before
    until_seconds: Union[float, None] = number(None, above=0)
    until_return: Union[float, None] = None  # mean return of an evaluation (--eval-every) at which the run ends

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
                "until_return is of evaluations during the run: say by eval_every how often there are some."
            )


@dataclasses.dataclass(frozen=True)
class GameConfig(StoppingOptions, EvaluationOptions, AgentOptions, EnvOptions):
    """Options of a topology whose agent learns from its own steps: those of its bases, and where its experience lies.

    Attributes:
        replays: what experience may be kept in, first what the topology is meant for.
        accepts_custom_replay: whether it may be kept in a `file.py:Class` as well.
    """

    replays: ClassVar[tuple[str, ...]] = ("shared_memory", "service", "reverb")
    accepts_custom_replay: ClassVar[bool] = True

    replay: str = "auto"  # where experience lies; auto: as the topology is meant; or file.py:Class

    def __post_init__(self) -> None:
        super().__post_init__()
        is_own = self.accepts_custom_replay and ":" in self.replay
        if self.replay not in ("auto", *self.replays) and not is_own:
            own = "A replay of your own is file.py:Class." if self.accepts_custom_replay else "It takes no other one."
            raise UsageError(
                f"The topology {self.name} keeps its experience in {' or '.join(self.replays)}, got replay="
                f"{self.replay!r}. {own}"
            )

    @property
    def replay_kind(self) -> str:
        """The replay's kind: local, shared_memory, service, reverb, or the name of a user's class."""
        return self.replays[0] if self.replay == "auto" else self.replay

    def requires(self, experiment: Experiment) -> list[str]:
        """See `TopologyConfig`."""
        return ["reverb"] if self.replay_kind == "reverb" else []

    def extras_option(self, experiment: Experiment) -> str:
        """See `TopologyConfig`."""
        return super().extras_option(experiment) + (" --replay reverb" if self.replay == "reverb" else "")


@dataclasses.dataclass(frozen=True)
class GameProgram(ProgramConfig, GameConfig):
    """Options of a topology of several nodes whose actors share the environments."""

    num_actors: int = number(2, at_least=1)  # of a topology of several processes; of elastic to begin with
    replay_shards: int = number(1, at_least=1)  # services that share the replay, where it is the service

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replay_shards != 1 and self.replay_kind != "service":
            raise UsageError(
                f"replay_shards={self.replay_shards} is for --replay service: {self.replay_kind} has none. Leave it "
                "at 1, or choose that replay."
            )

        if self.replay_kind == "reverb" and not issubclass(self.engine_class, RunsReverb):
            others = " or ".join(f"--replay {kind}" for kind in self.replays if kind != "reverb")
            raise UsageError(f"The engine {self.engine_name} runs no Reverb server: use {others}, or another engine.")


def find_topology(name: str, learns_from: str = "steps") -> Topology:
    """Return the function of a topology, by its name or `file.py:function`.

    Raises:
        UsageError: there is none for agents that learn from `learns_from`.
    """
    found = registry.find(name, registry.TOPOLOGIES[learns_from], "topology", "file.py:function")
    if not callable(found):
        raise UsageError(f"{name} is {found!r}; a topology is a function of an engine and a session.")
    needed = config_class_of(found).learns_from
    if needed != learns_from:
        raise UsageError(
            f"The topology {name} is for agents that learn from {needed}; this one learns from {learns_from}."
        )
    return found


def config_class_of(topology: Topology) -> type[TopologyConfig]:
    """Return the dataclass of a topology's options: that of `configured_by`, or `GameProgram`."""
    return getattr(topology, "config_cls", GameProgram)
