"""The topology light_env, for fast environments. Inference services compute the actions of several actors in batches.

actors ──steps──▶ replay ──batches──▶ learner
 ▲  │                                   │
 │  └──observations──▶ inferencers ◀────┘ parameters
 └─────────actions─────────┘

`distributed` has a replay server instead of shared memory, so its nodes may run on several machines.
"""

from __future__ import annotations

import dataclasses

from rlframe import extras
from rlframe.actors import Actor
from rlframe.engines import Engine
from rlframe.inferencers import Inferencer
from rlframe.learners import Learner
from rlframe.programs.options.fields import option
from rlframe.programs.session import Session
from rlframe.programs.topologies.config import GameProgram, configured_by
from rlframe.programs.topologies.makers import (
    actor_options,
    add_replay,
    env_builder,
    inferencer_config,
    learner_config,
)
from rlframe.programs.training.game_monitor import GameMonitor


@dataclasses.dataclass(frozen=True)
class LightEnv(GameProgram):
    """Options of the topology light_env."""

    name: str = "light_env"
    num_inferencers: int = option(1, at_least=1)  # With light_env and distributed: number of inference services.
    # Number of environment pools per actor. With 2, one pool steps while a service computes the other pool's actions.
    num_pools: int = option(1, at_least=1)


@dataclasses.dataclass(frozen=True)
class Distributed(LightEnv):
    """Options of the topology distributed."""

    replays = ("reverb", "service")

    name: str = "distributed"

    @property
    def engine_name(self) -> str:
        """See `ProgramConfig`. The default is Launchpad with Reverb, if both are installed."""
        has_both = extras.is_installed("launchpad") and extras.is_installed("reverb")
        wants_reverb = self.replay in ("auto", "reverb")
        return "launchpad" if self.engine == "auto" and has_both and wants_reverb else super().engine_name

    @property
    def replay_kind(self) -> str:
        """See `GameConfig`. The default is Reverb with Launchpad, and the replay service with other engines."""
        if self.replay == "auto" and self.engine_name != "launchpad":
            return "service"
        return super().replay_kind


@configured_by(LightEnv)
def light_env(engine: Engine, session: Session) -> None:
    """Add a learner, inference services, actors that call them, and a monitor."""
    config = LightEnv.of(session.experiment)
    replay_buffer = add_replay(engine, session)
    learner = engine.add("learner", Learner, learner_config(session), session.agent, replay_buffer)
    inferencers = [
        engine.add("inferencer", Inferencer, inferencer_config(session, index), session.agent, learner)
        for index in range(config.num_inferencers)
    ]
    options = {**actor_options(session), "num_pools": config.num_pools}
    actors = [
        engine.add("actor", Actor, env_builder(session.experiment), inferencers, replay_buffer, rank, **options)
        for rank in range(config.num_actors)
    ]
    engine.add("monitor", GameMonitor, session, learner, actors)


@configured_by(Distributed)
def distributed(engine: Engine, session: Session) -> None:
    """Add the nodes of `light_env`, with a replay server that other machines can reach."""
    light_env(engine, session)
