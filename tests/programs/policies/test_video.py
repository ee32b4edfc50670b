"""A video is recorded in an environment that has the options of evaluations."""

from __future__ import annotations

import pytest

from rlframe.programs.options.make_experiment import make_experiment
from rlframe.programs.policies.video import VideoRecorder
from tests.extras import needs

OPTIONS = {"env_kwargs": {"reward_clip": True, "lives": 3}, "eval_env_kwargs": {"reward_clip": False}}


@pytest.fixture
def filmed(tmp_path):
    """Return a function that makes a `VideoRecorder`, and returns the gymnasium environment that it records."""
    needs("gymnasium")
    films = []

    def env_of(**fields):
        films.append(VideoRecorder(make_experiment(preset="none", **fields), tmp_path / "film.mp4"))
        return films[-1].make_pool(seed=1)._pool._groups[0].envs[0].env._env.unwrapped

    yield env_of
    for film in films:
        film.__exit__(None, None, None)


def test_recorded_environment_has_the_evaluation_options(filmed):
    name = "sutton_barto_reward"
    env = filmed(env_type="loop", env_kwargs={name: False}, eval_env_kwargs={name: True})
    assert env._sutton_barto_reward is True


def test_environment_builder_gets_the_evaluation_options(filmed, tmp_path):
    (tmp_path / "env.py").write_text(
        "import gymnasium\n\ndef make(render_mode=None, **options):\n"
        "    env = gymnasium.make('CartPole-v1', render_mode=render_mode)\n"
        "    env.unwrapped.options = options\n    return env\n"
    )
    assert filmed(env=f"{tmp_path}/env.py:make", **OPTIONS).options == {"reward_clip": False, "lives": 3}


def test_options_of_envpool_are_not_passed_to_the_recorded_gymnasium_environment(filmed):
    assert filmed(env_type="envpool", **OPTIONS).spec.kwargs == {"render_mode": "rgb_array"}
