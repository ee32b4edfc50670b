"""R2D2's preset. The defaults of `R2D2Config` are the paper's, for 256 actors on Atari."""

from __future__ import annotations

from rlframe.programs.presets.table import Preset, settings

PAPER = "Kapturowski et al. 2019, section 2.3 and table of hyper-parameters"

POSITION_ONLY_CARTPOLE = Preset(
    name="r2d2/position_only_cartpole",
    envs=("PositionOnlyCartPole-v1",),
    fields={
        **settings(
            PAPER,
            agent__n_step=5,
            agent__rescaling=1e-3,
            agent__epsilon=0.4,
            agent__epsilon_exponent=7.0,
            agent__priority_exponent=0.9,
            agent__max_share=0.9,
            agent__importance_exponent=0.6,
            network="lstm",
        ),
        **settings(
            "found here: benchmarks/notes/position-only-cartpole.md",
            agent__batch_size=32,
            agent__sequence_length=32,
            agent__burn_in=8,
            agent__period=16,
            agent__replay_capacity=100_000,
            agent__min_replay_size=100,
            agent__update_period=16,  # each step is learned from 64 times
            agent__target_update_period=300,
            agent__discount=0.99,
            agent__learning_rate=1e-3,
            agent__adam_epsilon=1e-5,
            agent__anneal_learning_rate=True,
            agent__max_grad_norm=10.0,
            network__hidden=(64,),
            network__size=64,
            network__activation="relu",
        ),
        **settings("our choice", steps=300_000, num_envs=8, network__orthogonal=True),
    },
)

PRESETS = (POSITION_ONLY_CARTPOLE,)
