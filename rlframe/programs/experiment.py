"""The description of a run: everything that decides its numbers, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlframe.envs.gymnasium_registry import restore
from rlframe.envs.names import backend, registration
from rlframe.errors import UsageError
from rlframe.programs.options import registry
from rlframe.programs.options.fields import check_numbers, number
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
    """What to train, on what, for how long, in which program. `config.json` of a run directory holds one of these.

    Agents that learn from games count environment steps, agents that learn language count learner steps (after the
    supervised ones of their config). `make_experiment` makes one from flat keywords and a preset.
    """

    agent: str = "ppo"  # a name that `rlframe agents` lists, or file.py:Class
    env: str = "CartPole-v1"  # a name that `rlframe envs` lists, or file.py:make_env; for language file.py:Class
    steps: int = number(100_000, at_least=1)  # environment (language: learner) steps of the run: schedules end there
    seed: int = 1
    num_envs: int = number(8, at_least=1)  # in all: actors share them, so presets mean the same however many there are
    env_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)  # options of the environment itself
    # steps between two evaluations; 0: only the one at the end (language: after the warm-up, too)
    eval_every: int = number(0, at_least=0)
    # steps between two checkpoints; 0: only when the run stops. (A topology of several processes saves every 30 s in
    # any case: its learner may die, and must not begin anew.)
    checkpoint_every: int = number(100_000, at_least=0)
    log_every: int = number(0, at_least=0)  # steps between two rows of the logs; 0: a 100th of the run, 10,000 at most
    # options of the topology, among them those of network, evaluation and stopping: docs/programs.md
    topology_config: TopologyConfig = dataclasses.field(
        default_factory=lambda: config_class_of(find_topology("single_process"))()
    )
    agent_config: Any = None  # the dataclass of the agent, as `PPOConfig`; None: its defaults

    def __post_init__(self) -> None:
        check_numbers(self)
        if not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"seed must be between 0 and {MAX_SEED}, got {self.seed}.")
        if not isinstance(self.topology_config, TopologyConfig):
            raise UsageError(
                f"An Experiment's topology_config is a TopologyConfig, got {self.topology_config!r}; make_experiment "
                "takes the topology's name."
            )
        self.topology_config.check(self)
        if any(map(is_live, self.named_options.values())) and not self.topology_config.engine_class.in_process:
            check_no_live_objects(self.named_options, self.topology_config.name)

    @property
    def named_options(self) -> dict[str, Any]:
        """The options that name classes and functions, by option: `agent`, `env`, `network`, ..."""
        values = {**vars(self), **vars(self.topology_config), "topology": self.topology_config.name}
        return {option: values[option] for option in OPTIONS if option in values}

    def __getstate__(self) -> dict[str, Any]:
        # A node in another process lacks what the user registered with Gymnasium in this one.
        is_game = self.topology_config.learns_from == "steps" and registry.is_library_env(self.env)
        of_gymnasium = is_game and backend(self.env) == "gymnasium"
        spec = registration(self.env) if of_gymnasium else None
        return {**vars(self), "registered": spec, "places": module_directories(self.named_options.values())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        restore_module_directories(state.pop("places"))
        restore(state.pop("registered"))
        vars(self).update(state)

    def with_topology_options(self, **changes: Any) -> Experiment:
        """Return the same with other values of some fields of `topology_config`."""
        return dataclasses.replace(self, topology_config=dataclasses.replace(self.topology_config, **changes))

    @property
    def synchronous(self) -> Experiment:
        """The same with all environments of a pool in step."""
        return self.with_topology_options(async_envs=False, wait_num=None)

    @property
    def for_evaluation(self) -> Experiment:
        """The same as evaluations play it: environments in step, with `eval_env_kwargs`, and their true rewards."""
        env_kwargs = {**self.env_kwargs, **EvaluationOptions.of(self).eval_env_kwargs}
        return dataclasses.replace(self.synchronous.with_topology_options(clip_rewards=None), env_kwargs=env_kwargs)

    @property
    def num_awaited_envs(self) -> int:
        """Environments of a pool that an actor waits for: all, unless they are asynchronous."""
        config = EnvOptions.of(self)
        if not config.async_envs:
            return self.envs_per_pool
        return -(-self.envs_per_pool // 3) if config.wait_num is None else config.wait_num

    @property
    def envs_per_actor(self) -> int:
        """Environments of each actor."""
        return self.num_envs // EnvOptions.of(self).num_actors

    @property
    def envs_per_pool(self) -> int:
        """Environments of each of an actor's pools."""
        return self.envs_per_actor // EnvOptions.of(self).num_pools

    @property
    def row_every(self) -> int:
        """Steps between two rows of the logs."""
        return self.log_every or min(max(self.steps // 100, 1), 10_000)
