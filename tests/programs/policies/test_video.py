"""A video is recorded in an environment that has the options of evaluations."""

from __future__ import annotations

import numpy as np
import pytest

from rlframe.errors import UsageError
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


BLINK = """
import jax.numpy as jnp, numpy as np
from dm_env import specs

class Dark:
    observation_space = specs.Array((1,), np.float32, "observation")
    action_space = specs.DiscreteArray(2, np.int32, "action")

    def reset(self, rng):
        return jnp.zeros((), jnp.int32), jnp.zeros(1)

    def step(self, rng, state, action):
        return state + 1, jnp.zeros(1), 1.0, state >= 2, False

class Blink(Dark):
    def __init__(self, dtype="uint8"):
        self.dtype = dtype

    def render(self, state):
        return np.full((32, 48, 3), 255 * (state % 2), self.dtype)
"""


def record_jax(folder, name, **env_kwargs):
    """Record 5 timesteps of a JAX environment: FIRST, 3 steps, and FIRST. Return the metadata and the frames."""
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    (folder / "env.py").write_text(BLINK)
    experiment = make_experiment("ppo", f"{folder}/env.py:{name}", preset="none", env_kwargs=env_kwargs)
    with VideoRecorder(experiment, folder / "film.webm") as recorder:
        pool = recorder.make_pool(seed=1)
        pool.reset()
        for _ in range(4):
            pool.step(np.zeros(1, np.int32))
        assert recorder.frames == 5
    frames = imageio_ffmpeg.read_frames(str(folder / "film.webm"))
    return next(frames), [np.frombuffer(frame, np.uint8) for frame in frames]


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # The test starts a child process to read the video.
def test_jax_environment_is_recorded(tmp_path):
    metadata, frames = record_jax(tmp_path, "Blink")
    assert metadata["size"] == (48, 32) and metadata["fps"] == 30.0
    assert [round(frame.mean() / 255) for frame in frames] == [0, 1, 0, 1, 0]


def test_jax_environment_without_an_image_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"Dark cannot be recorded: it has no method render\(state\)"):
        record_jax(tmp_path, "Dark")
    with pytest.raises(UsageError, match=r"uint8 of shape \(height, width, 3\), but .* float32 of shape \(32, 48, 3\)"):
        record_jax(tmp_path, "Blink", dtype="float32")
