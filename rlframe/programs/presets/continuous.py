"""Presets of SAC and TD3. The defaults of their configs come from the papers; other libraries use these values."""

from __future__ import annotations

from rlframe.programs.presets.table import MUJOCO, Preset, settings

# --- SAC

SAC_PENDULUM = Preset(
    name="sac/pendulum",
    envs=("Pendulum-v[01]",),
    fields={
        **settings("rl-baselines3-zoo, hyperparams/sac.yml, Pendulum-v1", steps=20_000, agent__learning_rate=1e-3),
        **settings(
            "stable-baselines3, default of SAC",
            num_envs=1,
            agent__batch_size=256,
            agent__min_replay_size=100,
            agent__discount=0.99,
            agent__target_update_rate=0.005,
        ),
    },
)

SAC_MUJOCO = Preset(
    name="sac/mujoco",
    envs=MUJOCO,
    fields={
        **settings(
            "CleanRL, sac_continuous_action.py",
            steps=1_000_000,
            num_envs=1,
            agent__batch_size=256,
            agent__min_replay_size=5_000,
            agent__discount=0.99,
            agent__learning_rate=3e-4,
            agent__critic_learning_rate=1e-3,
            agent__target_update_rate=0.005,
        ),
        # rlframe scales actions to [-1, 1] before it computes their entropy. CleanRL does not, but the entropy is the
        # same if the action range is [-1, 1]. CleanRL makes two policy updates in every second step. rlframe makes
        # one policy update in each step.
        **settings(
            "CleanRL, sac_continuous_action.py, which scales a tanh to these bounds; here the value is clipped",
            agent__min_log_std=-5.0,
        ),
    },
)

# --- TD3

TD3_PENDULUM = Preset(
    name="td3/pendulum",
    envs=("Pendulum-v[01]",),
    fields={
        **settings(
            "rl-baselines3-zoo, hyperparams/td3.yml, Pendulum-v1",
            steps=20_000,
            agent__discount=0.98,
            agent__replay_capacity=200_000,
            agent__min_replay_size=10_000,
            agent__exploration_noise=0.1,
            agent__learning_rate=1e-3,
        ),
        **settings("stable-baselines3, default of TD3", num_envs=1, agent__batch_size=256),
    },
)

TD3_MUJOCO = Preset(
    name="td3/mujoco",
    envs=MUJOCO,
    fields=settings(
        "CleanRL, td3_continuous_action.py",
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

PRESETS = (SAC_PENDULUM, SAC_MUJOCO, TD3_PENDULUM, TD3_MUJOCO)
