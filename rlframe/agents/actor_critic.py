"""How PPO and IMPALA act: one network gives the parameters of a policy, and the value of the observation."""

from __future__ import annotations

from typing import Any

import jax

from rlframe.agents.base import Agent, NetFactory, PolicyFactory
from rlframe.agents.net_factory import build_network, default_config
from rlframe.agents.networks import Head
from rlframe.agents.policies import Policy, default_policy
from rlframe.agents.recurrent import Core
from rlframe.types import AgentOutput, AgentState, SequenceBatch, TimeStep, Tree


class ActorCritic(Agent):
    """Base of agents with a policy and a value, for discrete, multi-discrete and bounded continuous actions.

    A network's `apply` gives (the policy's parameters `[B, P]`, values `[B, 1]` or `[B]`). It may be recurrent
    (`rlframe.agents.recurrent`): an unroll is learned from the state that it began with.
    """

    def __init__(
        self,
        cfg: Any,
        observation_spec: Tree,
        action_spec: Tree,
        net_factory: NetFactory | None = None,
        policy_factory: PolicyFactory | None = None,
    ) -> None:
        super().__init__(cfg, observation_spec, action_spec, net_factory, policy_factory)
        self.policy: Policy = (policy_factory or default_policy)(action_spec)
        # Gains of orthogonal weights: baselines/common/policies.py. Deviations begin at exp(0).
        heads = (Head(self.policy.num_params, scale=0.01, num_free=self.policy.num_free), Head(1))
        factory = net_factory or default_config(self.networks, observation_spec)
        self.network = build_network(factory, observation_spec, action_spec, heads, may_recur=True)
        self._core = Core(self.network)

    def initial_state(self, batch_size: int) -> AgentState:
        return self._core.initial_state(batch_size)

    def actor_step(
        self, rng: jax.Array, params: Tree, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        (logits, value), state = self._core.step(params, timestep.observation, state)
        sample = self.policy.sample(rng, logits)
        return AgentOutput(self.policy.to_action(sample), self.acting_extras(logits, value, sample)), state

    def eval_step(
        self, rng: jax.Array, params: Tree, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        (logits, _), state = self._core.step(params, timestep.observation, state)
        return AgentOutput(self.policy.to_action(self.policy.mode(logits)), {}), state

    def acting_extras(self, logits: jax.Array, value: jax.Array, sample: jax.Array) -> dict[str, jax.Array]:
        """Return what the learner needs of a step: the log-probability, and the sample if `to_action` changes it."""
        extras = {"log_prob": self.policy.log_prob(logits, sample)}
        return {**extras, "sample": sample} if self.policy.clips else extras

    def samples(self, data: SequenceBatch) -> jax.Array:
        """Return [B, T, ...]: the policy's samples behind the actions of a batch."""
        return data.extras["sample"] if self.policy.clips else data.action
