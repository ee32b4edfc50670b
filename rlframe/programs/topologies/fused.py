"""The topology fused: environments, actions and updates in one jitted call, for JAX environments."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from rlframe.engines import Engine
from rlframe.envs.adapters import env_seed
from rlframe.envs.jax_pool import env_keys
from rlframe.envs.names import default_type, describe, is_jax
from rlframe.errors import UsageError
from rlframe.learners import Learner
from rlframe.programs.experiment import Experiment
from rlframe.programs.options import registry
from rlframe.programs.session import Session
from rlframe.programs.topologies.config import GameConfig, configured_by
from rlframe.programs.topologies.makers import learner_config, make_jax_envs
from rlframe.programs.training.loop import TrainingLoop


@dataclasses.dataclass(frozen=True)
class Fused(GameConfig):
    """Options of the topology fused."""

    hidden = ("replay", "env_type", "num_workers", "async_envs", "wait_num", "answer_timeout")
    replays = ("local",)
    accepts_custom_replay = False
    joins_seeds = True

    name: str = "fused"

    def check(self, experiment: Experiment) -> None:
        """See `TopologyConfig`."""
        super().check(experiment)
        env = registry.env_name_or_builder(experiment.env)
        if self.async_envs:
            default_type(env, experiment.num_envs, is_sync=False)  # raises for JAX environments
        if not is_jax(env) and self.env_type != "jax":
            raise UsageError(
                f"The topology fused needs a JAX environment, such as jax:CartPole-v1 or file.py:Class, got "
                f"{describe(env)}. Use the topology single_process for other environments."
            )


@configured_by(Fused)
def fused(engine: Engine, session: Session) -> None:
    """Add the only node: a `TrainingLoop` with a `FusedDriver`."""
    # Every command reads the options of all topologies, but only this topology needs these modules.
    from rlframe.device.driver import CompiledRounds, FusedDriver, SingleRun
    from rlframe.device.rounds import Start

    experiment, config = session.experiment, Fused.of(session.experiment)
    session.show("compiling")
    learner = Learner(learner_config(session), session.agent, None)
    compiled = CompiledRounds(
        session.agent, make_jax_envs(experiment), experiment.num_envs, config.clip_rewards, learner.devices
    )
    keys = env_keys(env_seed(experiment.seed, 0, 0), experiment.num_envs)
    start = Start(jax.random.PRNGKey(experiment.seed), *learner.state, keys)
    extras = None if learner.restored is None else learner.restored.extras
    restored = None if extras is None else extras.pop("device")  # the saved replay must not stay in memory
    if session.shared is None:
        compiled.check_memory(start, restored=int(restored is not None))
        device_run: Any = SingleRun(compiled, start, restored)
    else:
        device_run = session.shared.group.join(experiment.seed, compiled, start, restored)
    driver = FusedDriver(session.agent, learner, device_run, config.until_learner_steps)
    engine.add("train", TrainingLoop, session, driver)
