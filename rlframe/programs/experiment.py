"""The class `Experiment`: the options that affect the results of a run."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, ClassVar, Union

from rlframe.envs.gymnasium_registry import restore
from rlframe.envs.names import backend, registration
from rlframe.errors import UsageError
from rlframe.programs.options import registry
from rlframe.programs.options.fields import check_numbers, option
from rlframe.programs.options.object_names import check_no_live_objects, is_live
from rlframe.programs.options.registry import OPTIONS
from rlframe.programs.topologies.config import (
    EnvOptions,
    EvaluationOptions,
    TopologyConfig,
    config_class_of,
    find_topology,
)
from rlframe.user_code.files import module_directories, restore_module_directories

MAX_SEED = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The options of a run: agent, environment, steps, topology and others. `config.json` stores one experiment.

    Agents of games count environment steps. Agents of language models count learner steps, which start after the
    supervised steps of the agent's config. `make_experiment` makes an experiment from keyword arguments and a preset.
    """

    help_group: ClassVar[str] = "Run"

    agent: str = option("ppo", group="Agent")  # A name from `rlframe agents`, or file.py:Class.
    env: str = option("CartPole-v1", group="Environment")  # A name from `rlframe envs`, or file.py:make_env.
    steps: int = option(100_000, at_least=1, changeable=True)  # Environment steps; for language models, learner steps.
    # Step at which schedules end. 0 means --steps; --resume keeps it.
    schedule_steps: int = option(0, at_least=0, changeable=True)
    seed: int = 1  # Random seed.
    num_envs: int = option(8, at_least=1, group="Environment")  # Total number of environments of all actors.
    # Keyword arguments of the environment.
    env_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict, metadata={"group": "Environment"})
    eval_every: int = option(0, at_least=0, changeable=True)  # Steps between evaluations. 0 means only the final one.
    # Steps between checkpoints. 0: only after evaluations.
    checkpoint_every: int = option(100_000, at_least=0, changeable=True)
    # Steps between log rows. 0 means 1% of the run, at most 10,000.
    log_every: int = option(0, at_least=0, changeable=True, group="Logging")
    # Start from the parameters of a run: RUN_DIR[@STEP|@best].
    init_from: Union[str, None] = None
    init_skip_mismatched: bool = False  # With --init-from: load only the arrays that fit.
    # Options of the topology, which include network, evaluation and limits: see docs/run/topologies.md.
    topology_config: TopologyConfig = dataclasses.field(
        default_factory=lambda: config_class_of(find_topology("single_process"))()
    )
    agent_config: Any = None  # Config of the agent, for example a `PPOConfig`. None means the agent's defaults.

    def __post_init__(self) -> None:
        check_numbers(self)
        if not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"seed must be between 0 and {MAX_SEED}, got {self.seed}.")
        if self.init_from is not None:  # make it absolute now: user code may change the working directory
            object.__setattr__(self, "init_from", os.path.abspath(self.init_from))
        elif self.init_skip_mismatched:
            raise UsageError("init_skip_mismatched needs init_from: the run to start from.")
        if not isinstance(self.topology_config, TopologyConfig):
            raise UsageError(
                f"topology_config of an Experiment must be a TopologyConfig, got {self.topology_config!r}. To give a "
                "topology by name, call make_experiment."
            )
        self.topology_config.check(self)
        if any(map(is_live, self.named_options.values())) and not self.topology_config.engine_class.in_process:
            check_no_live_objects(self.named_options, self.topology_config.name)

    @property
    def named_options(self) -> dict[str, Any]:
        """The options whose values are names of classes or functions: `agent`, `env`, schedules and others."""
        from rlframe.agents.schedules import function_names  # imports JAX

        values = {**vars(self), **vars(self.topology_config), "topology": self.topology_config.name}
        named = {option: values[option] for option in OPTIONS if option in values}
        return {**named, **function_names(self.agent_config)}

    def __getstate__(self) -> dict[str, Any]:
        # Include the user's Gymnasium registration, because a node in another process does not have it.
        is_game = self.topology_config.learns_from == "steps" and registry.is_library_env(self.env)
        of_gymnasium = is_game and backend(self.env) == "gymnasium"
        spec = registration(self.env) if of_gymnasium else None
        return {**vars(self), "registered": spec, "places": module_directories(self.named_options.values())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        restore_module_directories(state.pop("places"))
        restore(state.pop("registered"))
        vars(self).update(state)

    def with_topology_options(self, **changes: Any) -> Experiment:
        """Return a copy in which some fields of `topology_config` are replaced."""
        return dataclasses.replace(self, topology_config=dataclasses.replace(self.topology_config, **changes))

    @property
    def synchronous(self) -> Experiment:
        """A copy of the experiment, with synchronous environments."""
        return self.with_topology_options(async_envs=False, wait_num=None)

    @property
    def for_evaluation(self) -> Experiment:
        """A copy of the experiment for evaluations.

        Its environments are synchronous, use `eval_env_kwargs`, and do not clip rewards.
        """
        env_kwargs = {**self.env_kwargs, **EvaluationOptions.of(self).eval_env_kwargs}
        return dataclasses.replace(self.synchronous.with_topology_options(clip_rewards=None), env_kwargs=env_kwargs)

    @property
    def num_awaited_envs(self) -> int:
        """Number of environments in a pool that an actor waits for at each step. All of them without `async_envs`."""
        config = EnvOptions.of(self)
        if not config.async_envs:
            return self.envs_per_pool
        return -(-self.envs_per_pool // 3) if config.wait_num is None else config.wait_num

    @property
    def envs_per_actor(self) -> int:
        """Number of environments of each actor."""
        return self.num_envs // EnvOptions.of(self).num_actors

    @property
    def envs_per_pool(self) -> int:
        """Number of environments of each pool. An actor has `num_pools` pools."""
        return self.envs_per_actor // EnvOptions.of(self).num_pools

    @property
    def row_every(self) -> int:
        """Steps between two rows of the logs."""
        return self.log_every or min(max(self.steps // 100, 1), 10_000)
