"""The topology single_process: one loop that acts and learns in turn, in one process."""

from __future__ import annotations

import dataclasses

from rlframe.engines import Engine
from rlframe.inferencers import Inferencer
from rlframe.learners import Learner
from rlframe.programs.options.fields import option
from rlframe.programs.session import Session
from rlframe.programs.topologies.config import GameConfig, configured_by
from rlframe.programs.topologies.makers import (
    add_replay,
    env_builder,
    inferencer_config,
    learner_config,
)
from rlframe.programs.training.driver import InlineDriver
from rlframe.programs.training.loop import TrainingLoop


@dataclasses.dataclass(frozen=True)
class SingleProcess(GameConfig):
    """Options of the topology single_process."""

    replays = ("local",)
    can_profile = True

    name: str = "single_process"
    # Steps between two saves of a large replay.
    replay_checkpoint_every: int = option(1_000_000, at_least=0, changeable=True, group="Run")


@configured_by(SingleProcess)
def single_process(engine: Engine, session: Session) -> None:
    """Add the only node: a `TrainingLoop`, which steps an actor and a learner in turn."""
    session.show("compiling")
    replay_buffer = add_replay(engine, session)
    # In a resumed run, the constructor of `Learner` restores the learner and the replay buffer.
    learner = Learner(learner_config(session), session.agent, replay_buffer)
    inferencer = Inferencer(inferencer_config(session), session.agent, learner)
    experiment = session.experiment
    inferencer.compile_ahead(experiment.num_awaited_envs)
    driver = InlineDriver(env_builder(experiment), inferencer, replay_buffer, learner, experiment.seed, session.show)
    engine.add("train", TrainingLoop, session, driver, SingleProcess.of(experiment).replay_checkpoint_every)
