"""An agent consists of pure functions and a config.

Contents of the files:

    algorithms        ppo, impala, pqn, dqn, r2d2, sac, td3, grpo
    base classes      base: Agent                    actor_critic: PPO, IMPALA     minibatches: PPO, PQN
                      q_learning: DQN, R2D2, PQN     twin_critics: SAC, TD3
    transforms        transforms: Normalized
    networks          networks: MLP, CNN             recurrent: LSTM, GRU          net_factory: builds the network
    math              returns: GAE, V-trace, ...     losses                        dqn_heads: quantiles, categories
                      distributions (of actions)     schedules: rates, clipping    trees
                      off_policy: replay, priorities
                      action_masks: legal actions    initializers: of parameters

An agent stores no parameters. An `Inferencer` calls its functions for acting, and a `Learner` its functions for
learning. Example for PPO on CartPole:

1. `PPO(PPOConfig(), observation_spec, action_spec)` builds a network and a distribution of actions.
   `initial_params(rng)` and `initial_learner_state(params)` return the initial values.
2. `actor_step(rng, params, timestep, state)` returns actions and `extras`, the values that the learner needs for the
   step. For PPO these are the log-probability and the value. `params` are the result of `actor_params`.
3. `replay_spec` defines the content of a batch. For PPO this is one unroll of each environment.
4. `learner_step(params, learner_state, batch)` returns new parameters, the next learner state, and logs. Most agents
   differentiate their `loss` of the batch once. PPO differentiates its `minibatch_loss` many times (minibatches.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlframe.extras import lazy_names

if TYPE_CHECKING:
    from rlframe.agents.action_masks import ActionMask
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
    "ActionMask",
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

# A module is imported on the first use of its names, because a run needs only one agent.
# The modules that do not have the name of an agent.
_MODULES = {"ActionMask": "action_masks", "Agent": "base", "LearnerState": "base", "Normalized": "transforms"}
__getattr__, __dir__ = lazy_names(
    __name__, {name: f"rlframe.agents.{_MODULES.get(name, name.removesuffix('Config').lower())}" for name in __all__}
)
