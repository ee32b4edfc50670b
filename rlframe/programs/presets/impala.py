"""IMPALA's presets. The defaults of `IMPALAConfig` are the paper's for Atari; CartPole's are ours."""

from __future__ import annotations

from rlframe.programs.presets.families import ATARI, ATARI_EVALUATION, ATARI_TRAINING, MUJOCO
from rlframe.programs.presets.table import Preset, settings

PAPER = "Espeholt et al. 2018, table G.1"
SCALABLE_AGENT = "scalable_agent, experiment.py"

CARTPOLE = Preset(
    name="impala/cartpole",
    envs=("CartPole-v[01]",),
    fields={
        **settings(PAPER, agent__discount=0.99, agent__entropy_cost=0.01, agent__anneal_learning_rate=True),
        # With fewer and larger updates (16 unrolls of 32 steps) the values fit too late: 3 of 4 seeds at best.
        **settings(
            "found here: 10 of 10 seeds end at 500",
            steps=300_000,
            num_envs=16,
            agent__unroll_length=10,
            agent__batch_size=8,
            agent__vtrace_lambda=0.95,
            agent__optimiser="adam",
            agent__learning_rate=2e-3,
        ),
        # That norm is of the policy's and the values' gradients together.
        **settings("found here: clipped at the paper's 40, 1 seed of 4 ended at 357", agent__max_grad_norm=None),
    },
)

ATARI_GAMES = Preset(
    name="impala/atari",
    envs=ATARI,
    excluded_envs=MUJOCO,
    fields={
        **settings(
            PAPER,
            env_kwargs=ATARI_TRAINING,
            agent__unroll_length=20,
            agent__batch_size=32,
            agent__discount=0.99,
            agent__value_cost=0.5,
            agent__entropy_cost=0.01,
            agent__optimiser="rmsprop",
            agent__learning_rate=6e-4,
            agent__anneal_learning_rate=True,
            agent__rmsprop_epsilon=0.01,
            agent__max_grad_norm=40.0,
        ),
        **settings(SCALABLE_AGENT, agent__rmsprop_decay=0.99, network__orthogonal=False),  # Sonnet's initial weights
        **settings("Mnih et al. 2015: the network", network="nature_cnn"),
        **settings("Mnih et al. 2015: whole games, true scores", eval_env_kwargs=ATARI_EVALUATION),
        **settings("our choice: a fifth of the paper's 50 million", steps=10_000_000),
        **settings("our choice: a batch has one unroll of each", num_envs=32),
    },
)

PRESETS = (CARTPOLE, ATARI_GAMES)
