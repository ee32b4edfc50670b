"""Agents: pure functions and a config.

Which file is what:

    algorithms        ppo, impala, pqn, dqn, r2d2, sac, td3, grpo
    their bases       base: Agent, of all            actor_critic: PPO, IMPALA     minibatches: PPO, PQN
                      q_learning: DQN, R2D2, PQN     twin_critics: SAC, TD3        off_policy: DQN, R2D2, SAC, TD3
    around an agent   transforms: Normalized
    networks          networks: MLP, CNN             recurrent: LSTM, GRU          net_factory: makes an agent's network
    math              returns: GAE, V-trace, ...     losses                        dqn_heads: quantiles, categories
                      distributions: of actions      optimizers                    trees
    checks            subclass_checks: of the methods of a user's own agent

An agent holds no parameters. An `Inferencer` calls how it acts, a `Learner` how it learns. For PPO on CartPole:

1. `PPO(PPOConfig(), observation_spec, action_spec)` builds a network and a distribution of actions.
   `initial_params(rng)` and `initial_learner_state(params)` are the beginning.
2. `actor_step(rng, params, timestep, state)` returns actions and `extras`: what the learner needs of the step, here the
   log-probability and the value. `params` are what `actor_params` published.
3. `replay_spec` says what a batch is: here an unroll of each environment.
4. `learner_step(params, learner_state, batch)` returns new parameters, the next state, and logs. Most agents
   differentiate their `loss` of the batch. PPO differentiates its `minibatch_loss` many times: minibatches.py.
"""

from __future__ import annotations

from rlframe.agents.base import Agent, LearnerState
from rlframe.agents.dqn import DQN, DQNConfig
from rlframe.agents.grpo import GRPO, GRPOConfig
from rlframe.agents.impala import IMPALA, IMPALAConfig
from rlframe.agents.ppo import PPO, PPOConfig
from rlframe.agents.pqn import PQN, PQNConfig
from rlframe.agents.r2d2 import R2D2, R2D2Config
from rlframe.agents.sac import SAC, SACConfig
from rlframe.agents.td3 import TD3, TD3Config
from rlframe.agents.transforms import Normalized

__all__ = [
    "DQN",
    "GRPO",
    "IMPALA",
    "PPO",
    "PQN",
    "R2D2",
    "SAC",
    "TD3",
    "Agent",
    "DQNConfig",
    "GRPOConfig",
    "IMPALAConfig",
    "LearnerState",
    "Normalized",
    "PPOConfig",
    "PQNConfig",
    "R2D2Config",
    "SACConfig",
    "TD3Config",
]
