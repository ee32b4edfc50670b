"""The topology heavy_env, for slow environments. Each actor has its own inferencer in its process.

actor + inferencer ──steps──▶ replay ──batches──▶ learner
        ▲                                           │
        └───────────────parameters──────────────────┘
"""

from __future__ import annotations

import dataclasses

from rlframe.actors import Actor
from rlframe.engines import Engine
from rlframe.inferencers import Inferencer
from rlframe.learners import Learner
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
class HeavyEnv(GameProgram):
    """Options of the topology heavy_env."""

    name: str = "heavy_env"


@configured_by(HeavyEnv)
def heavy_env(engine: Engine, session: Session) -> None:
    """Add a learner, actors with one inferencer each, and a monitor."""
    replay_buffer = add_replay(engine, session)
    learner = engine.add("learner", Learner, learner_config(session), session.agent, replay_buffer)
    actors = []
    for rank in range(HeavyEnv.of(session.experiment).num_actors):
        inferencer = Inferencer(inferencer_config(session, rank), session.agent, learner)
        builder = env_builder(session.experiment)
        actors.append(engine.add("actor", Actor, builder, inferencer, replay_buffer, rank, **actor_options(session)))
    engine.add("monitor", GameMonitor, session, learner, actors)
