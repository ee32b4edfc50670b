"""Tests that published parameters and checkpoints never contain NaN or infinity."""

from __future__ import annotations

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlframe.actors import Actor
from rlframe.agents import DQN, PPO, SAC, DQNConfig, PPOConfig, SACConfig
from rlframe.envs import SyncEnv
from rlframe.errors import NonFiniteLossError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.learners import Checkpointer, Learner, LearnerConfig
from rlframe.replay import ReplayBuffer
from tests.fakes import ACTION_SPEC, OBSERVATION_SPEC, CountingAgent, CountingConfig, RecordingBuffer, reward_batch

GOOD, NAN, INFINITE = [1.0] * 4, [np.nan] * 4, [np.inf] * 4


class Counting(CountingAgent):
    """An agent whose logged loss is always finite. Its actors get the parameters and a value of the learner state."""

    def learner_step(self, params, learner_state, batch):
        params, learner_state, logs = super().learner_step(params, learner_state, batch)
        return params, learner_state, {**logs, "loss": jnp.zeros(())}

    def actor_params(self, params, learner_state):
        return {**params, "updates": learner_state.steps, "table": params["w"] * jnp.ones((200, 200))}


class Eager(Counting):
    jit_learner_step = False


class LossOnly(Counting):
    """An agent whose parameters remain finite even if the loss is not finite."""

    def learner_step(self, params, learner_state, batch):
        params, learner_state, logs = super().learner_step(params, learner_state, batch)
        loss, params = params["w"], jax.tree.map(jnp.nan_to_num, params)
        return params, learner_state, {**logs, "loss": loss}


class Statistics(Counting):
    """An agent that publishes a value computed from the parameters. It can be infinite if they are finite."""

    def actor_params(self, params, learner_state):
        return {**super().actor_params(params, learner_state), "scale": 1.0 / (params["w"] - 1.0)}


def make(agent_cls=Counting, checkpoint_dir=None, **config) -> Learner:
    agent = agent_cls(CountingConfig(**config), OBSERVATION_SPEC, ACTION_SPEC)
    directory = None if checkpoint_dir is None else str(checkpoint_dir)
    return Learner(LearnerConfig(checkpoint_dir=directory), agent, RecordingBuffer())


def published(learner) -> list[np.ndarray]:
    """Return all arrays that actors receive, from `get_params` and from `get_packed`."""
    trees = [learner.get_params()[1], learner.get_packed()[1].unpack_numpy()]
    return [np.asarray(leaf) for tree in trees for leaf in jax.tree.leaves(tree)]


def is_finite(arrays) -> bool:
    return all(np.isfinite(array).all() for array in arrays)


@pytest.mark.parametrize("rewards", [NAN, INFINITE, [1.0, 1.0, -np.inf, 1.0]])
@pytest.mark.parametrize("agent_cls", [Counting, Eager])
def test_non_finite_parameters_are_never_published(agent_cls, rewards):
    learner = make(agent_cls)
    learner.step(reward_batch(GOOD))
    learner.step(reward_batch(rewards))
    version, params = learner.get_params()
    assert (version, params["w"], params["updates"], params["table"][7, 7]) == (3, 0.5, 1, 0.5)
    assert is_finite(published(learner))
    with pytest.raises(
        NonFiniteLossError, match=r"parameter is NaN or infinite after learner step 2, on a batch of 4.*Nothing was"
    ):
        learner.step(reward_batch(GOOD))
    assert is_finite(published(learner))
    learner.step(reward_batch(GOOD))  # the caller ignores the error and continues
    assert is_finite(published(learner)) and learner.params_version == 4
    learner.close()


@pytest.mark.parametrize("wait_or_save", [Learner.wait_for_update, Learner.save])
def test_wait_for_update_and_save_raise_an_error_after_a_non_finite_update(wait_or_save, tmp_path):
    learner = make(checkpoint_dir=tmp_path)
    learner.step(reward_batch(GOOD))
    learner.save()
    learner.step(reward_batch(NAN))
    with pytest.raises(NonFiniteLossError, match=r"after learner step 2.* checkpoint is .*1\."):
        wait_or_save(learner)
    with pytest.raises(NonFiniteLossError, match="'w'"):
        learner.save()
    assert Checkpointer(str(tmp_path)).steps() == [1]
    resumed = make(checkpoint_dir=tmp_path)
    resumed.restore()
    assert resumed.get_params()[1]["w"] == 0.5
    for each in (learner, resumed):
        each.close()


def test_shared_memory_readers_never_receive_nan():
    learner = make()
    reader = learner.publication_reader()
    learner.step(reward_batch(GOOD))
    learner.step(reward_batch(NAN))
    version, packed = -1, None
    while version < learner.params_version:
        version, packed = reader.read() or (-1, None)
    assert packed.unpack_numpy()["w"] == 0.5
    learner.close()


def test_non_finite_statistics_are_not_published():
    learner = make(Statistics, learning_rate=1.0)  # with this rate, each update sets w to the reward
    learner.step(reward_batch([3.0] * 4))
    learner.step(reward_batch([1.0] * 4))
    assert learner.get_params()[1]["scale"] == 0.5
    with pytest.raises(NonFiniteLossError, match="after learner step 2"):
        learner.wait_for_update()
    learner.close()


def test_nan_loss_raises_an_error_even_if_the_parameters_are_finite():
    learner = make(LossOnly)
    learner.step(reward_batch(NAN))
    assert is_finite(published(learner))
    with pytest.raises(NonFiniteLossError, match="loss of learner step 1 is nan"):
        learner.wait_for_update()
    learner.close()


def test_non_finite_initial_parameters_are_rejected():
    class Bad(Counting):
        def initial_params(self, rng):
            return {"w": jnp.full((), jnp.nan)}

    with pytest.raises(NonFiniteLossError, match="'w'.* after learner step 0"):
        make(Bad)


class NanRewards(gymnasium.Wrapper):
    """An environment wrapper: after `good` steps, all rewards are NaN."""

    def __init__(self, env: gymnasium.Env, good: int) -> None:
        super().__init__(env)
        self._good = good

    def step(self, action):
        self._good -= 1
        observation, reward, *rest = self.env.step(action)
        return observation, reward if self._good >= 0 else float("nan"), *rest


AGENTS = {
    "dqn": (DQN, DQNConfig(batch_size=4, min_replay_size=8, update_period=4), "CartPole-v1"),
    "dqn_prioritized": (
        DQN,
        DQNConfig(4, min_replay_size=8, update_period=4, prioritized=True, total_learner_steps=9),
        "CartPole-v1",
    ),
    "ppo": (PPO, PPOConfig(unroll_length=4, num_epochs=2, num_minibatches=2), "CartPole-v1"),
    "sac": (SAC, SACConfig(batch_size=4, min_replay_size=8), "Pendulum-v1"),
}


@pytest.mark.parametrize(
    "name", ["ppo", *(pytest.param(one, marks=pytest.mark.system) for one in ("dqn_prioritized", "dqn", "sac"))]
)
def test_agent_never_acts_with_non_finite_parameters(name, tmp_path):
    agent_cls, cfg, env_name = AGENTS[name]

    def env_builder():
        return SyncEnv(lambda: NanRewards(gymnasium.make(env_name), good=40), 2, "loop", check_finite=False)

    env = env_builder()
    agent = agent_cls(cfg, env.observation_spec, env.action_spec)
    env.close()
    buffer = ReplayBuffer(agent)
    learner = Learner(LearnerConfig(checkpoint_dir=str(tmp_path)), agent, buffer)
    inferencer = Inferencer(InferencerConfig(), agent, learner)
    actor = Actor(env_builder, inferencer, buffer)
    with pytest.raises(NonFiniteLossError):
        for _ in range(400):
            actor.step()
            if learner.step(buffer.sample()) is not None and learner.learner_steps == 3:
                learner.save()
            assert is_finite(published(learner))
    assert is_finite(published(learner)) and inferencer.params_version > 3
    with pytest.raises(NonFiniteLossError):
        learner.save()
    resumed = Learner(LearnerConfig(checkpoint_dir=str(tmp_path)), agent, ReplayBuffer(agent))
    resumed.restore()
    assert resumed.learner_steps == 3 and is_finite(published(resumed))
    for each in (actor, learner, resumed):
        each.close()
