"""The topology single_process: the loop of the design document, without any call to another process."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from rlframe.engines import Engine
from rlframe.errors import UsageError
from rlframe.inferencers import Inferencer
from rlframe.learners import Learner
from rlframe.programs import naming
from rlframe.programs.experiment import Experiment
from rlframe.programs.run import Run
from rlframe.programs.topologies.config import GameConfig, configured_by
from rlframe.programs.topologies.parts import add_replay, env_builder, inferencer_config, learner_config, pool_type
from rlframe.programs.training_loop import TrainingLoop


@dataclasses.dataclass(frozen=True)
class SingleProcess(GameConfig):
    """What single_process can be told."""

    replays = ("local",)
    engine: ClassVar[str] = "rlframe.engines.inline:InlineEngine"

    name: str = "single_process"
    replay_checkpoint_every: int = 1_000_000  # of a single process: the same for a replay too large to go into each


@configured_by(SingleProcess)
def single_process(engine: Engine, run: Run) -> None:
    """Add the one node: a loop over an actor and a learner."""
    _check_answer_timeout_is_read(run.experiment)
    replay_buffer = add_replay(engine, run)
    config = dataclasses.replace(learner_config(run), resume=False)  # the loop restores everything together
    learner = Learner(config, run.agent, replay_buffer)
    inferencer = Inferencer(inferencer_config(run), run.agent, learner)
    engine.add("train", TrainingLoop, run, env_builder(run.experiment), inferencer, replay_buffer, learner)


def _check_answer_timeout_is_read(experiment: Experiment) -> None:
    """Raises UsageError for an answer_timeout of a single process whose pool does not see environments hang."""
    default, value = GameConfig.answer_timeout, experiment.topology.answer_timeout
    if value == default:
        return
    kind = pool_type(experiment, experiment.num_envs, naming.env_name_or_builder(experiment.env))
    if kind in ("loop", "envpool"):
        raise UsageError(
            f"answer_timeout={value:g} is for the env_type thread or process: {kind}, in a single "
            f"process, does not read it. Leave it at {default:g}, or choose another env_type."
        )
