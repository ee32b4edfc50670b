"""Run an agent and its trained policy with given sizes of observations, layers and batches, to find crashes.

python -m tests.act_and_learn '{"shape": [210, 160, 3], "batches": [1, 2, 8]}'
"""

from __future__ import annotations

import json
import sys
from typing import Any

import gymnasium
import numpy as np

from rlframe.actors import Actor
from rlframe.agents import DQN, PPO, Agent, DQNConfig, PPOConfig
from rlframe.agents.networks import MLPConfig
from rlframe.envs import SyncEnv
from rlframe.envs.codec import Codec
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.learners import Learner, LearnerConfig
from rlframe.params.packing import PackedParams
from rlframe.params.publication import LocalParams
from rlframe.programs.policies.trained import TrainedPolicy
from rlframe.replay import ReplayBuffer


class Sized(gymnasium.Env):
    """An environment with episodes of two steps. Images have the dtype uint8, other observations float32."""

    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, shape: tuple[int, ...]) -> None:
        dtype = np.uint8 if len(shape) == 3 else np.float32
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, dtype)
        self._observation = np.ones(shape, dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._steps = 0
        return self._observation, {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return self._observation, 1.0, self._steps == 2, False, {}


def main(agent: str, shape: list[int], layers: list[int] | None, batches: list[int], learn: list[int] | None) -> None:
    """Act and learn with each batch size. Print a line for each batch size, and `done` at the end.

    Args:
        agent: `ppo` or `dqn`.
        shape: shape of an observation.
        layers: layer sizes of an MLP. None means the agent's default network.
        batches: batch sizes. A batch size is both the number of environments and the number of items in an update.
        learn: batch sizes for which the agent also learns and the trained policy acts. None means all batch sizes.
    """
    network = None if layers is None else MLPConfig(tuple(layers), separate=False, orthogonal=False)
    for batch in batches:
        with SyncEnv(lambda: Sized(tuple(shape)), batch) as env:
            made = _made(agent, env, network, batch)
            replay_buffer = ReplayBuffer(made)
            learner = Learner(LearnerConfig(), made, replay_buffer)
            actor = Actor(lambda env=env: env, Inferencer(InferencerConfig(), made, learner), replay_buffer)
            for _ in range(2):
                actor.step()
            if learn is None or batch in learn:
                assert learner.step(replay_buffer.sample()) is not None
                actor.step()
                _act_with_trained_policy(made, learner, env)
            learner.close()
        print("batch", batch, flush=True)
    print("done")


def _made(agent: str, env: SyncEnv, network: Any, batch: int) -> Agent:
    if agent == "ppo":
        cfg = PPOConfig(unroll_length=1, num_epochs=1, num_minibatches=1)
        return PPO(cfg, env.observation_spec, env.action_spec, network)
    cfg = DQNConfig(batch_size=batch, min_replay_size=1, replay_capacity=64, optimizer="adam")
    return DQN(cfg, env.observation_spec, env.action_spec, network)


def _act_with_trained_policy(agent: Agent, learner: Learner, env: SyncEnv) -> None:
    """Act on a single observation, on a batch, and on a single observation again."""
    source = LocalParams()
    version, params = learner.get_params()
    source.publish(version, PackedParams.of(params))
    policy = TrainedPolicy(agent, Codec.of_specs(agent.observation_spec, agent.action_spec), source)
    observation = env.reset().observation
    for explore in (False, True):
        for each in (observation[0], observation, observation[0]):
            policy.reset()
            policy.act(each, explore=explore)


if __name__ == "__main__":
    case = {"agent": "ppo", "layers": None, "batches": [1, 2, 8], "learn": None, **json.loads(sys.argv[1])}
    main(**case)
