"""SAC's presets. The defaults of `SACConfig` are the paper's; these are what others found to learn fast."""

from __future__ import annotations

from rlframe.programs.presets.table import MUJOCO, Preset, settings

ZOO = "rl-baselines3-zoo, hyperparams/sac.yml"
SB3 = "stable-baselines3, the default of SAC"
CLEANRL = "CleanRL, sac_continuous_action.py"

PENDULUM = Preset(
    name="sac/pendulum",
    envs=("Pendulum-v[01]",),
    fields={
        **settings(f"{ZOO}, Pendulum-v1", steps=20_000, agent__learning_rate=1e-3),
        **settings(
            SB3,
            num_envs=1,
            agent__batch_size=256,
            agent__min_replay_size=100,
            agent__discount=0.99,
            agent__target_update_rate=0.005,
        ),
    },
)

MUJOCO_TASKS = Preset(
    name="sac/mujoco",
    envs=MUJOCO,
    fields={
        **settings(
            CLEANRL,
            steps=1_000_000,
            num_envs=1,
            agent__batch_size=256,
            agent__min_replay_size=5_000,
            agent__discount=0.99,
            agent__learning_rate=3e-4,
            agent__critic_learning_rate=1e-3,
            agent__target_update_rate=0.005,
        ),
        # Entropies are of actions in units of half their range; CleanRL's are of the actions themselves, which is the
        # same for ranges of [-1, 1]. It takes two policy updates every second step, for the one here in each.
        **settings(f"{CLEANRL}, which scales a tanh to these bounds; here they clip", agent__min_log_std=-5.0),
    },
)

PRESETS = (PENDULUM, MUJOCO_TASKS)
