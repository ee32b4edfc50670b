"""TD3's presets. The defaults of `TD3Config` are the paper's; these are what others found to learn fast."""

from __future__ import annotations

from rlframe.programs.presets.table import MUJOCO, Preset, settings

ZOO = "rl-baselines3-zoo, hyperparams/td3.yml"
SB3 = "stable-baselines3, the default of TD3"
CLEANRL = "CleanRL, td3_continuous_action.py"

PENDULUM = Preset(
    name="td3/pendulum",
    envs=("Pendulum-v[01]",),
    fields={
        **settings(
            f"{ZOO}, Pendulum-v1",
            steps=20_000,
            agent__discount=0.98,
            agent__replay_capacity=200_000,
            agent__min_replay_size=10_000,
            agent__exploration_noise=0.1,
            agent__learning_rate=1e-3,
        ),
        **settings(SB3, num_envs=1, agent__batch_size=256),
    },
)

MUJOCO_TASKS = Preset(
    name="td3/mujoco",
    envs=MUJOCO,
    fields=settings(
        CLEANRL,
        steps=1_000_000,
        num_envs=1,
        agent__batch_size=256,
        agent__min_replay_size=25_000,
        agent__discount=0.99,
        agent__learning_rate=3e-4,
        agent__exploration_noise=0.1,
        network="mlp",
        network__hidden=(256, 256),
        network__activation="relu",
        network__orthogonal=False,
    ),
)

PRESETS = (PENDULUM, MUJOCO_TASKS)
