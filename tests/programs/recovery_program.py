"""A program for test_recovery.py, which kills its nodes: `python recovery_program.py TOPOLOGY DIRECTORY STEPS`."""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any

import launchpad as lp

from rlframe import Actor, Inferencer, InferencerConfig, Learner, LearnerConfig, SharedMemReplayBuffer, SyncEnv
from rlframe.agents import IMPALA, IMPALAConfig
from rlframe.engines.group_rules import ON_CPU, GroupRules
from rlframe.engines.launchpad import launch
from rlframe.errors import RlframeError
from rlframe.replay.reverb import ReverbReplayBuffer

NUM_ACTORS = {"heavy_env": 2, "distributed": 1}  # few actors, because TensorFlow takes seconds to load
NUM_ENVS = 4


class ProgressPrintingLearner(Learner):
    """A Learner that prints its step, its parameter version, and the number of items that its replay has received."""

    def print_progress(self, event: str) -> None:
        added = self._replay.buffer.stats()["added"]
        print(f"learner {os.getpid()} {event}: {self.learner_steps} {self.params_version} {added}", flush=True)

    def step(self, batch: Any) -> Any:
        logs = super().step(batch)
        if self.learner_steps % 10 == 0:
            self.print_progress("is at")
        return logs

    def run(self) -> None:
        print(f"learner {os.getpid()} begins at: {self.learner_steps} {self.params_version} 0", flush=True)
        super().run()

    def _learn(self) -> None:
        super()._learn()
        # Print now, because `run` ends the program, and then the replay server cannot answer.
        self.print_progress("ends at")


def env_builder(seed: int) -> SyncEnv:
    return SyncEnv("gymnasium:CartPole-v1", NUM_ENVS, "loop", seed=seed)


def make_program(topology: str, directory: pathlib.Path, steps: int) -> tuple[lp.Program, Any]:
    env = env_builder(seed=1)
    config = IMPALAConfig(unroll_length=10, batch_size=4, total_learner_steps=steps)
    agent = IMPALA(config, env.observation_spec, env.action_spec)
    env.close()
    learner_cfg = LearnerConfig(
        max_learner_steps=steps,
        checkpoint_dir=str(directory / "checkpoints"),
        checkpoint_seconds=0.5,
        resume=True,
    )
    program, memory = lp.Program(topology), None
    if topology == "heavy_env":
        replay = memory = SharedMemReplayBuffer(agent, num_writers=NUM_ACTORS[topology])
    else:
        from rlframe.engines.reverb_node import CheckpointedReverbNode

        tables = ReverbReplayBuffer.tables(agent, block=NUM_ENVS)
        with program.group("replay"):
            replay = program.add_node(CheckpointedReverbNode(tables, directory / "replay", seconds=0.5))
    with program.group("learner"):
        learner = program.add_node(lp.CourierNode(ProgressPrintingLearner, learner_cfg, agent, replay))
    inferencer: Any = Inferencer(InferencerConfig(), agent, learner)
    if topology == "distributed":
        with program.group("inferencer"):
            inferencer = program.add_node(lp.CourierNode(Inferencer, InferencerConfig(), agent, learner))
    with program.group("actor"):
        for rank in range(NUM_ACTORS[topology]):
            program.add_node(lp.CourierNode(Actor, env_builder, inferencer, replay, rank))
    return program, memory


def main(topology: str, directory: str, steps: str) -> None:
    program, memory = make_program(topology, pathlib.Path(directory), int(steps))
    rules = {
        label: GroupRules(max_restarts=0 if label == "actor" else 2, ends_program=label == "learner", env=ON_CPU)
        for label in program.groups
    }
    try:
        print("launched:", launch(program, rules))
    except RlframeError as error:
        print("failed:", error)
        sys.exit(error.exit_code)
    finally:
        if memory is not None:
            memory.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
