"""IMPALA with asynchronous environments: `python examples/async_env.py`.

The steps of this CartPole take different times. The actor acts on the first 6 of 16 environments that answer, while the
other environments are still stepping. `rlframe train --async --wait-num 6` does the same in every topology.
"""

import time

import gymnasium

from rlframe import (
    Actor,
    AsyncEnv,
    Evaluator,
    Inferencer,
    InferencerConfig,
    Learner,
    LearnerConfig,
    ReplayBuffer,
    SyncEnv,
)
from rlframe.agents import IMPALA
from rlframe.programs import make_experiment

LEARNER_STEPS = 2_500

preset = make_experiment("impala", "CartPole-v1", preset="impala/cartpole", total_learner_steps=LEARNER_STEPS)
num_envs, unroll_length = preset.num_envs, preset.agent_config.unroll_length


class UnevenCartPole(gymnasium.Wrapper):
    """CartPole whose steps take 1 ms on average, like a remote simulator."""

    def step(self, action):
        time.sleep(self.np_random.exponential(0.001))
        return super().step(action)


def make_env():
    return UnevenCartPole(gymnasium.make("CartPole-v1"))


# For an environment that computes in Python, use "process" instead of "thread".
env = AsyncEnv(make_env, num_envs, 6, "thread", num_workers=num_envs, seed=1)
agent = IMPALA(preset.agent_config, env.observation_spec, env.action_spec)
# The other environments complete several unrolls while the slowest one completes one.
replay_buffer = ReplayBuffer(agent, capacity=4 * num_envs * unroll_length)
learner = Learner(LearnerConfig(seed=1), agent, replay_buffer)
inferencer = Inferencer(InferencerConfig(), agent, learner)
actor = Actor(env, inferencer, replay_buffer)

began = time.monotonic()
while learner.learner_steps < LEARNER_STEPS:
    actor.step()
    logs = learner.step(replay_buffer.sample())
    if logs and learner.learner_steps % 250 == 0:
        rate = actor.env_steps / (time.monotonic() - began)
        print(f"{actor.env_steps:7} steps ({rate:.0f} a second)  {actor.episodes:5} episodes  loss {logs['loss']:.3f}")
actor.close()


def env_builder(seed):
    return SyncEnv("CartPole-v1", 20, "loop", seed=seed)


evaluator = Evaluator(env_builder, Inferencer(InferencerConfig(greedy=True), agent, learner), episodes=20)
print(f"return {evaluator.evaluate()['return_mean']:.1f} over 20 episodes")
evaluator.close()
