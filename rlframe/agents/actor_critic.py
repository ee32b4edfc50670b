"""How PPO and IMPALA act: one network outputs the parameters of a distribution and the value of the observation."""

from __future__ import annotations

from typing import Any

import jax

from rlframe.agents.base import Agent, NetFactory, PolicyFactory
from rlframe.agents.distributions import Distribution, default_distribution
from rlframe.agents.net_factory import build_network, default_network_config
from rlframe.agents.networks import Head
from rlframe.agents.recurrent import SteppedNetwork
from rlframe.types import AgentOutput, AgentState, SequenceBatch, TimeStep, Tree


class ActorCritic(Agent):
    """Base class of agents with a policy and a value function.

    Supports discrete, multi-discrete and bounded continuous actions. A network's `apply` returns (parameters of the
    distribution `[B, P]`, values `[B, 1]` or `[B]`). The network may be recurrent (`rlframe.agents.recurrent`).
    Learning then unrolls it from the state at the start of the unroll.
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
        self.distribution: Distribution = (policy_factory or default_distribution)(action_spec)
        # The gains of orthogonal weights are from baselines/common/policies.py. The initial standard deviation is 1.
        heads = (Head(self.distribution.num_params, scale=0.01, num_free=self.distribution.num_free), Head(1))
        factory = net_factory or default_network_config(self.network_configs, observation_spec)
        self.network = build_network(factory, observation_spec, action_spec, heads, may_recur=True)
        self._stepped = SteppedNetwork(self.network)

    def initial_state(self, batch_size: int) -> AgentState:
        return self._stepped.initial_state(batch_size)

    def actor_step(
        self, rng: jax.Array, params: Tree, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        (logits, value), state = self._stepped.step(params, timestep.observation, state)
        sample = self.distribution.sample(rng, logits)
        return AgentOutput(self.distribution.to_action(sample), self.acting_extras(logits, value, sample)), state

    def eval_step(
        self, rng: jax.Array, params: Tree, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        (logits, _), state = self._stepped.step(params, timestep.observation, state)
        return AgentOutput(self.distribution.to_action(self.distribution.mode(logits)), {}), state

    def acting_extras(self, logits: jax.Array, value: jax.Array, sample: jax.Array) -> dict[str, jax.Array]:
        """Return the values of a step that the learner needs: the log-probability, and sometimes the sample.

        The learner needs the sample if `to_action` changes the sample.
        """
        extras = {"log_prob": self.distribution.log_prob(logits, sample)}
        return {**extras, "sample": sample} if self.distribution.clips else extras

    def samples(self, data: SequenceBatch) -> jax.Array:
        """Return [B, T, ...]: the samples of the distribution. `to_action` converted them to the actions in `data`."""
        return data.extras["sample"] if self.distribution.clips else data.action
