"""A Launchpad program with the nodes of the topology for light environments: `python -m tests.light_env`.

In addition, a third actor has its own Inferencer with a handle to the learner, as for heavy environments. Each node
prints one line of JSON when it ends.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rlframe import SyncEnv
from rlframe.actors import Actor
from rlframe.agents import DQN, DQNConfig
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.learners import Learner, LearnerConfig
from rlframe.replay import ReplayBuffer


def env_builder(seed: int = 0) -> SyncEnv:
    return SyncEnv("gymnasium:CartPole-v1", 4, "loop", seed=seed)


class ReplayingLearner(Learner):
    """A Learner that also contains the replay buffer.

    It stops the program after at least 150 learner steps and after it has learned from all three actors.
    """

    def __init__(self, cfg: LearnerConfig, agent: Any) -> None:
        buffer = ReplayBuffer(agent)
        super().__init__(cfg, agent, buffer)
        self.claim_rank, self.open_segment, self.add = buffer.claim_rank, buffer.open_segment, buffer.add
        self._seen: set[int] = set()
        self._newest = 0

    def step(self, batch: Any) -> Any:
        self._seen |= set(batch.keys[:, 0].tolist())
        self._newest = max(self._newest, int(batch.params_version.max()))
        logs = super().step(batch)
        if self.learner_steps >= 150 and len(self._seen) == 3:
            self.stop()
        return logs

    def run(self) -> None:
        import launchpad as lp

        super().run()
        report(learner_steps=self.learner_steps, ranks=sorted(self._seen), newest_version_acted=self._newest)
        lp.stop()


class ReportingInferencer(Inferencer):
    def run(self) -> None:
        super().run()
        report(**self.stats())


class ReportingActor(Actor):
    def run(self) -> None:
        super().run()
        report(rank=self.rank, env_steps=self.env_steps)


def report(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def make_program() -> Any:
    import launchpad as lp

    env = env_builder()
    cfg = DQNConfig(min_replay_size=64, batch_size=32, replay_capacity=5000)
    agent = DQN(cfg, env.observation_spec, env.action_spec)
    env.close()
    program = lp.Program("light_env")
    with program.group("learner"):
        learner = program.add_node(lp.CourierNode(ReplayingLearner, LearnerConfig(), agent))
    with program.group("inferencer"):
        inferencer = program.add_node(lp.CourierNode(ReportingInferencer, InferencerConfig(), agent, learner))
    with program.group("actor"):
        for _ in range(2):
            program.add_node(lp.CourierNode(ReportingActor, env_builder, inferencer, learner, num_pools=2))
        own = Inferencer(InferencerConfig(), agent, learner)
        program.add_node(lp.CourierNode(ReportingActor, env_builder, own, learner))
    return program


if __name__ == "__main__":
    import launchpad as lp

    from tests import light_env  # Classes of the module `__main__` cannot be sent to other processes.

    sys.argv = sys.argv[:1]
    lp.launch(light_env.make_program(), launch_type="local_mp", terminal="current_terminal")
