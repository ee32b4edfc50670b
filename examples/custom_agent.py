"""REINFORCE with a baseline (Williams 1992): an agent in one file, without registration.

rlframe train --agent examples/custom_agent.py:Reinforce --env CartPole-v1 --num-envs 8 --steps 150000
"""

from __future__ import annotations

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp

from rlframe import Agent
from rlframe.errors import UsageError
from rlframe.types import LAST, AgentOutput, ReplaySpec, Sequence, specs


@dataclasses.dataclass(frozen=True)
class ReinforceConfig:
    learning_rate: float = 3e-3
    discount: float = 0.98
    unroll_length: int = 32  # Steps of each environment between two updates.


class Reinforce(Agent):
    config_cls = ReinforceConfig

    def __init__(self, cfg, observation_spec, action_spec):
        super().__init__(cfg, observation_spec, action_spec)
        if not isinstance(action_spec, specs.DiscreteArray):
            raise UsageError(f"Reinforce needs Discrete actions, got the action spec {action_spec!r}.")

        def forward(observation):
            logits = hk.nets.MLP([64, 64, action_spec.num_values], activation=jnp.tanh, name="policy")(observation)
            baseline = hk.nets.MLP([64, 64, 1], activation=jnp.tanh, name="baseline")(observation)
            return logits, baseline[..., 0]

        self.network = hk.without_apply_rng(hk.transform(forward))

    @property
    def replay_spec(self):
        """Use each unroll once. A batch has one unroll of every environment."""
        length = self.cfg.unroll_length
        return ReplaySpec("queue", Sequence(length), batch_size=None, capacity=64 * length, max_staleness=0)

    def initial_params(self, rng):
        return self.network.init(rng, jnp.zeros((1, *self.observation_spec.shape)))

    def actor_step(self, rng, params, timestep, state):
        logits, _ = self.network.apply(params, timestep.observation)
        return AgentOutput(jax.random.categorical(rng, logits).astype(jnp.int32)), state

    def eval_step(self, rng, params, timestep, state):
        logits, _ = self.network.apply(params, timestep.observation)
        return AgentOutput(jnp.argmax(logits, axis=-1).astype(jnp.int32)), state

    def loss(self, params, learner_state, batch):
        data = batch.data  # [B, T, ...], observations and step types [B, T + 1, ...]
        logits, baseline = self.network.apply(params, data.observation)
        returns = self._returns(data, jax.lax.stop_gradient(baseline))
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), data.action[..., None], axis=-1)[..., 0]
        error = returns - baseline[:, :-1]
        counts = data.step_type[:, :-1] != LAST  # the environment ignores the action after LAST
        policy_loss = -jnp.mean(chosen * jax.lax.stop_gradient(error), where=counts)
        return policy_loss + jnp.mean(jnp.square(error), where=counts), {"policy_loss": policy_loss}

    def _returns(self, data, baseline):
        """Return discounted returns [B, T]. Bootstrap from the baseline at truncations and at the end of the unroll."""
        cut = data.step_type[:, 1:] == LAST

        def step(following, inputs):
            reward, discount, cut, value = inputs
            return (reward + self.cfg.discount * discount * jnp.where(cut, value, following),) * 2

        inputs = (data.reward.T, data.discount.T, cut.T, baseline[:, 1:].T)
        return jax.lax.scan(step, baseline[:, -1], inputs, reverse=True)[1].T
