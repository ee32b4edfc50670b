"""Record videos of an environment."""

from __future__ import annotations

import contextlib
import os
import pathlib
import warnings
from typing import Any

import jax
import numpy as np

from rlframe import extras
from rlframe.envs import SyncEnv, gymnasium_registry
from rlframe.envs.api_checks import check_image
from rlframe.envs.gymnasium_registry import gymnasium_ids
from rlframe.envs.jax_envs import make_jax_env
from rlframe.envs.jax_pool import JaxPool
from rlframe.envs.names import backend, split, takes_seed
from rlframe.errors import RlframeError, UsageError
from rlframe.programs.experiment import Experiment
from rlframe.programs.options import registry
from rlframe.programs.presets import plain_name
from rlframe.programs.topologies.config import EnvOptions
from rlframe.programs.topologies.makers import env_pool_type
from rlframe.shutdown import Closeable
from rlframe.types import TimeStep

_FORMATS = (".mp4", ".mkv", ".webm")
_DEFAULT_FPS = 30


class VideoRecorder(Closeable):
    """Creates a video file and a pool with one environment. Each step of the environment adds a frame to the video.

    Args:
        experiment: experiment with the environment to record.
        path: video file to write.

    Raises:
        UsageError: the format is unknown, or imageio-ffmpeg is not installed.
    """

    def __init__(self, experiment: Experiment, path: str | os.PathLike) -> None:
        self._experiment = experiment.for_evaluation
        self._path = pathlib.Path(path).absolute()
        self.frames = 0
        self._writer: Any = None
        self._opened = contextlib.ExitStack()
        if self._path.suffix not in _FORMATS:
            raise UsageError(f"The format of a video must be {', '.join(_FORMATS)}, got {self._path.name!r}.")
        with extras.explain_import_error("A video", "gymnasium"):
            import gymnasium  # noqa: F401
            import imageio_ffmpeg  # noqa: F401

        # If there is no display, this variable makes pygame render off-screen, and avoids a warning.
        if "DISPLAY" not in os.environ:
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")

    def close(self) -> None:
        """Close the pool and the video file."""
        self._opened.close()

    def make_pool(self, seed: int) -> SyncEnv | JaxPool:
        """Create the pool with the environment to record.

        Raises:
            UsageError: the environment does not render.
        """
        config, env = EnvOptions.of(self._experiment), registry.env_name_or_builder(self._experiment.env)
        if env_pool_type(self._experiment, 1, env) == "jax":
            return _RecordedJaxPool(make_jax_env(env, self._experiment.env_kwargs), seed, config, self)
        make_env = lambda: _RecordedEnv(_rendering_env(self._experiment, seed), self)  # noqa: E731
        pool = SyncEnv(make_env, 1, "loop", seed=seed, **_seen_by_policy(config))
        return self._opened.enter_context(contextlib.closing(pool))

    def add(self, frame: Any, fps: float) -> None:
        """Add one frame, uint8 [H, W, 3], to the video."""
        check_image(self._experiment.env, frame)
        # Video codecs store colors at half the resolution, so width and height must be even.
        height, width = frame.shape[0] // 2 * 2, frame.shape[1] // 2 * 2
        if self._writer is None:
            self._writer = self._open(width, height, fps)
        try:
            self._writer.send(np.ascontiguousarray(frame[:height, :width], np.uint8))
        except OSError as error:
            raise RlframeError(f"Cannot write {self._path}: {error}.") from error
        self.frames += 1

    def _open(self, width: int, height: int, fps: float) -> Any:
        import imageio_ffmpeg

        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            writer = imageio_ffmpeg.write_frames(
                str(self._path),
                (width, height),
                fps=fps,
                codec="libvpx-vp9" if self._path.suffix == ".webm" else "libx264",
                macro_block_size=2,
                ffmpeg_log_level="error",
            )
            with warnings.catch_warnings():
                # JAX warns about the fork here, although the child process starts another program immediately.
                warnings.simplefilter("ignore", RuntimeWarning)
                writer.send(None)
        except OSError as error:
            raise RlframeError(f"Cannot write {self._path}: {error}.") from error
        return self._opened.enter_context(contextlib.closing(writer))


class _RecordedEnv:
    """A gymnasium environment that adds a frame to the video after each reset and step."""

    def __init__(self, env: Any, recorder: VideoRecorder) -> None:
        self._env = env
        self._recorder = recorder
        self._fps = float(env.metadata.get("render_fps") or _DEFAULT_FPS)
        self.observation_space, self.action_space = env.observation_space, env.action_space

    def reset(self, **kwargs: Any) -> Any:
        result = self._env.reset(**kwargs)
        self._recorder.add(self._env.render(), self._fps)
        return result

    def step(self, action: Any) -> Any:
        result = self._env.step(action)
        self._recorder.add(self._env.render(), self._fps)
        return result

    def close(self) -> None:
        self._env.close()


class _RecordedJaxPool(JaxPool):
    """A pool of one JAX environment that adds a frame to the video after each reset and step."""

    def __init__(self, env: Any, seed: int, config: EnvOptions, recorder: VideoRecorder) -> None:
        if not callable(getattr(env, "render", None)):
            raise UsageError(
                f"{type(env).__name__} cannot be recorded: it has no method render(state), which returns an RGB array, "
                "uint8 of shape (height, width, 3)."
            )
        super().__init__(env, 1, seed, **_seen_by_policy(config))
        self._env, self._recorder = env, recorder
        self._fps = float(getattr(env, "render_fps", _DEFAULT_FPS))

    def step(self, actions: np.ndarray) -> TimeStep:
        timestep = super().step(actions)
        state = jax.tree.map(lambda leaf: np.asarray(leaf[0]), self._carry.state)
        self._recorder.add(np.asarray(self._env.render(state)), self._fps)
        return timestep


def _seen_by_policy(config: EnvOptions) -> dict[str, Any]:
    """Return the options of a pool that change the observations and actions."""
    return {name: getattr(config, name) for name in ("frame_stack", "action_repeat", "action_mask")}


def _rendering_env(experiment: Experiment, seed: int) -> Any:
    """Return the run's environment, with rendering. For an EnvPool task, return Gymnasium's version of the task."""
    target = registry.env_name_or_builder(experiment.env)
    if not isinstance(target, str):
        return _from_builder(target, experiment, seed)
    where = backend(target)
    if where == "dm_control":
        raise UsageError(f"{target}: a video needs an environment of Gymnasium; dm_control is not supported.")
    name = split(target)[1]
    # Do not pass `env_kwargs` to Gymnasium's version of the task, because they are options of EnvPool.
    if where == "envpool" and EnvOptions.of(experiment).env_type in ("auto", "envpool"):
        return _gymnasium_version(plain_name(name))
    return gymnasium_registry.make(name, {"render_mode": "rgb_array", **experiment.env_kwargs})


def _from_builder(builder: Any, experiment: Experiment, seed: int) -> Any:
    seeds = {"seed": seed} if takes_seed(builder) else {}
    try:
        env = builder(render_mode="rgb_array", **experiment.env_kwargs, **seeds)
    except TypeError as error:
        raise UsageError(
            f"{experiment.env} cannot be recorded: it must accept render_mode='rgb_array' and return a gymnasium "
            f"environment ({error})."
        ) from error
    if not hasattr(env, "render"):
        raise UsageError(f"{experiment.env} cannot be recorded: {type(env).__name__} has no render().")
    return env


def _gymnasium_version(task: str) -> Any:
    """Return the Gymnasium environment that has the same observations as an EnvPool task."""
    import gymnasium

    if task in gymnasium_ids():
        return gymnasium.make(task, render_mode="rgb_array")
    if not extras.has("ale_py"):
        raise UsageError(
            f"EnvPool's {task} does not render, and Gymnasium's version of it is not installed. "
            "For an Atari game: pip install 'gymnasium[atari]'."
        )
    import ale_py

    gymnasium.register_envs(ale_py)
    if f"ALE/{task}" not in gymnasium.registry:
        raise UsageError(f"EnvPool's {task} does not render, and Gymnasium has no version of it.")
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    # Use EnvPool's defaults: 84 x 84 grayscale, every 4th frame, 4 stacked frames, up to 30 no-op actions at the start.
    env = gymnasium.make(f"ALE/{task}", render_mode="rgb_array", frameskip=1, repeat_action_probability=0.0)
    return FrameStackObservation(AtariPreprocessing(env), 4)
