"""REINFORCE with a recurrent network: an agent in one file, for a task that needs memory.

rlframe train --agent examples/recurrent_agent.py:Remembering --env PositionOnlyCartPole-v1 --num-envs 8 --steps 500000

`actor_step` returns a recurrent state in addition to the actions. The Actor passes this state to the next step of the
same environment. At the first step of an episode (FIRST), the Actor passes `initial_state` instead. The loss does the
same: it starts with the state that was stored with the sequence, and resets the state at FIRST.
"""

from __future__ import annotations

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from rlframe import Agent
from rlframe.errors import UsageError
from rlframe.types import FIRST, LAST, AgentOutput, ReplaySpec, Sequence, specs


@dataclasses.dataclass(frozen=True)
class RememberingConfig:
    learning_rate: float = 1e-3
    discount: float = 0.98
    # Steps of each environment between two updates. Also the length of backpropagation through time.
    unroll_length: int = 16
    size: int = 64  # Size of the recurrent state.


class Remembering(Agent):
    config_cls = RememberingConfig

    def __init__(self, cfg, observation_spec, action_spec):
        super().__init__(cfg, observation_spec, action_spec)
        if not isinstance(action_spec, specs.DiscreteArray):
            raise UsageError(f"Remembering needs Discrete actions, got the action spec {action_spec!r}.")

        def forward(observation, state):
            features = jnp.tanh(hk.Linear(64)(10.0 * observation))  # scale up, because positions are about 0.1
            features, state = hk.GRU(cfg.size)(features, state)
            return (hk.Linear(action_spec.num_values)(features), hk.Linear(1)(features)[:, 0]), state

        self.network = hk.without_apply_rng(hk.transform(forward))

    @property
    def replay_spec(self):
        """Use each unroll once. A batch has one unroll of every environment."""
        length = self.cfg.unroll_length
        return ReplaySpec("queue", Sequence(length), batch_size=None, capacity=64 * length, max_staleness=0)

    def initial_params(self, rng):
        return self.network.init(rng, jnp.zeros((1, *self.observation_spec.shape)), self.initial_state(1))

    def initial_state(self, batch_size):
        """Return zeros [B, size], the state at FIRST."""
        return np.zeros((batch_size, self.cfg.size), np.float32)

    def actor_step(self, rng, params, timestep, state):
        (logits, _), state = self.network.apply(params, timestep.observation, state)
        return AgentOutput(jax.random.categorical(rng, logits).astype(jnp.int32)), state

    def eval_step(self, rng, params, timestep, state):
        (logits, _), state = self.network.apply(params, timestep.observation, state)
        return AgentOutput(jnp.argmax(logits, axis=-1).astype(jnp.int32)), state

    def loss(self, params, learner_state, batch):
        data = batch.data  # [B, T, ...], observations and step types [B, T + 1, ...], agent_state [B, size]
        logits, baseline = self._unroll(params, data)
        returns = self._returns(data, jax.lax.stop_gradient(baseline))
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), data.action[..., None], axis=-1)[..., 0]
        error = returns - baseline[:, :-1]
        counts = data.step_type[:, :-1] != LAST  # the environment ignores the action after LAST
        advantage = jax.lax.stop_gradient(error / (jnp.std(error, where=counts) + 1e-3))
        policy_loss = -jnp.mean(chosen * advantage, where=counts)
        return policy_loss + 0.1 * jnp.mean(jnp.square(error), where=counts), {"policy_loss": policy_loss}

    def _unroll(self, params, data):
        """Return logits [B, T + 1, A] and baseline [B, T + 1], starting with the stored state of the unroll."""

        def step(state, inputs):
            observation, step_type = inputs
            state = jnp.where((step_type == FIRST)[:, None], 0.0, state)  # like the Actor
            outputs, state = self.network.apply(params, observation, state)
            return state, outputs

        time_major = (jnp.swapaxes(data.observation, 0, 1), data.step_type.T)
        _, (logits, baseline) = jax.lax.scan(step, data.agent_state, time_major)
        return jnp.swapaxes(logits, 0, 1), baseline.T

    def _returns(self, data, baseline):
        """Return discounted returns [B, T]. Bootstrap from the baseline at truncations and at the end of the unroll."""
        cut = data.step_type[:, 1:] == LAST

        def step(following, inputs):
            reward, discount, cut, value = inputs
            return (reward + self.cfg.discount * discount * jnp.where(cut, value, following),) * 2

        inputs = (data.reward.T, data.discount.T, cut.T, baseline[:, 1:].T)
        return jax.lax.scan(step, baseline[:, -1], inputs, reverse=True)[1].T
