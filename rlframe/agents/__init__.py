"""Agents: pure functions and a config. The base class, one file per algorithm, and the math that they share.

An agent holds no parameters. An `Inferencer` calls how it acts, a `Learner` how it learns. For PPO on CartPole:

1. `PPO(PPOConfig(), observation_spec, action_spec)` builds a network (networks.py, net_factory.py) and a policy
   (policies.py). `initial_params(rng)` and `initial_learner_state(params)` are the beginning.
2. `actor_step(rng, params, timestep, state)` returns actions and `extras`: what the learner needs of the step, here the
   log-probability and the value. `params` are what `actor_params` published.
3. `replay_spec` says what a batch is: here an unroll of each environment.
4. `learner_step(params, learner_state, batch)` returns new parameters, the next state, and logs. It differentiates
   `loss`, whose terms are in losses.py and returns.py (GAE).

Base classes: `ActorCritic` (PPO, IMPALA), `MinibatchAgent` (PPO, PQN), `QLearning` (PQN; DQN and
R2D2 by `TargetNetworkAgent`) and `TwinCriticAgent` (SAC, TD3). `Normalized` is an agent around an agent.
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
