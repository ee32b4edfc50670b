"""Families of environments that several presets name."""

from __future__ import annotations

MUJOCO = tuple(
    f"{robot}-v[2-5]"
    for robot in (
        "Ant",
        "HalfCheetah",
        "Hopper",
        "Humanoid",
        "HumanoidStandup",
        "InvertedDoublePendulum",
        "InvertedPendulum",
        "Pusher",
        "Reacher",
        "Swimmer",
        "Walker2d",
    )
)

# EnvPool's Atari tasks, and Gymnasium's under `ALE/`, are the only families at v5 besides MuJoCo.
ATARI = ("*-v5",)

# Training sees clipped rewards and a life as an episode (Mnih et al. 2015); evaluation plays whole games.
ATARI_TRAINING = {"episodic_life": True, "reward_clip": True}
ATARI_EVALUATION = {"episodic_life": False, "reward_clip": False}
