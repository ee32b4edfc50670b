"""REINFORCE with a memory: a recurrent agent in one file, on a task that needs it.

rlframe train --agent examples/recurrent_agent.py:Remembering --env PositionOnlyCartPole-v1 --num-envs 8 --steps 500000

An agent's state is what it gives beside its actions: the Actor keeps it, hands it back with the next timestep of the
same environment, and puts `initial_state` in its place where that is FIRST. Whoever learns from a sequence does the
same, from the state that was stored with it.
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
    unroll_length: int = 16  # steps of each environment between two updates, and of the gradient through time
    size: int = 64  # of the memory


class Remembering(Agent):
    config_cls = RememberingConfig

    def __init__(self, cfg, observation_spec, action_spec):
        super().__init__(cfg, observation_spec, action_spec)
        if not isinstance(action_spec, specs.DiscreteArray):
            raise UsageError(f"Remembering needs Discrete actions, got the action spec {action_spec!r}.")

        def forward(observation, state):
            features = jnp.tanh(hk.Linear(64)(10.0 * observation))  # positions are about 0.1
            features, state = hk.GRU(cfg.size)(features, state)
            return (hk.Linear(action_spec.num_values)(features), hk.Linear(1)(features)[:, 0]), state

        self.network = hk.without_apply_rng(hk.transform(forward))

    @property
    def replay_spec(self):
        """Each unroll once, one of every environment."""
        length = self.cfg.unroll_length
        return ReplaySpec("queue", Sequence(length), batch_size=None, capacity=64 * length, max_staleness=0)

    def initial_params(self, rng):
        return self.network.init(rng, jnp.zeros((1, *self.observation_spec.shape)), self.initial_state(1))

    def initial_state(self, batch_size):
        """[B, size] zeros: the state at FIRST."""
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
        counts = data.step_type[:, :-1] != LAST  # the environment ignored the actions after LAST
        advantage = jax.lax.stop_gradient(error / (jnp.std(error, where=counts) + 1e-3))
        policy_loss = -jnp.mean(chosen * advantage, where=counts)
        return policy_loss + 0.1 * jnp.mean(jnp.square(error), where=counts), {"policy_loss": policy_loss}

    def _unroll(self, params, data):
        """(logits [B, T + 1, A], baseline [B, T + 1]), from the state that the unroll began with."""

        def step(state, inputs):
            observation, step_type = inputs
            state = jnp.where((step_type == FIRST)[:, None], 0.0, state)  # as the Actor does
            outputs, state = self.network.apply(params, observation, state)
            return state, outputs

        swap_batch_and_time = (jnp.swapaxes(data.observation, 0, 1), data.step_type.T)
        _, (logits, baseline) = jax.lax.scan(step, data.agent_state, swap_batch_and_time)
        return jnp.swapaxes(logits, 0, 1), baseline.T

    def _returns(self, data, baseline):
        """Discounted rewards [B, T] to the episode's end, or to where it was cut and the baseline goes on."""
        cut = data.step_type[:, 1:] == LAST

        def step(following, inputs):
            reward, discount, cut, value = inputs
            return (reward + self.cfg.discount * discount * jnp.where(cut, value, following),) * 2

        inputs = (data.reward.T, data.discount.T, cut.T, baseline[:, 1:].T)
        return jax.lax.scan(step, baseline[:, -1], inputs, reverse=True)[1].T
