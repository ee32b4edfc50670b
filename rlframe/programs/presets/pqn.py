"""PQN's preset. The defaults of `PQNConfig` are the paper's, for Atari; what solves CartPole is ours."""

from __future__ import annotations

from rlframe.programs.presets.table import Preset, settings

CARTPOLE = Preset(
    name="pqn/cartpole",
    envs=("CartPole-v[01]",),
    fields={
        **settings(
            "CleanRL, pqn.py",
            agent__num_epochs=4,
            agent__anneal_learning_rate=True,
            agent__max_grad_norm=10.0,
            network="mlp",
            network__activation="relu",
            network__layer_norm=True,
        ),
        **settings(
            "found here, among 18 variants: benchmarks/notes/pqn-cartpole.md",
            num_envs=16,
            agent__unroll_length=64,
            agent__num_minibatches=16,
            agent__discount=0.99,
            agent__q_lambda=0.95,
            agent__learning_rate=5e-4,
            agent__epsilon_end=0.01,
            agent__epsilon_decay_share=0.3,
        ),
        # Once every game lasts, gradients vanish, and with Adam's usual 1e-8 the next failure is a step of full length.
        **settings(
            "Dopamine, jax/agents/dqn/configs/dqn_cartpole.gin: its DQN's; benchmarks/notes/pqn-cartpole.md",
            agent__adam_epsilon=3.125e-4,
        ),
        **settings("our choice", steps=300_000, network__hidden=(128, 128), network__orthogonal=False),
    },
)

PRESETS = (CARTPOLE,)
