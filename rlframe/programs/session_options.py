"""The options of a session: those of `rlframe train` that do not reach the numbers of a run."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Literal, Union

from rlframe.errors import UsageError
from rlframe.programs.env_backend import import_env
from rlframe.programs.experiment import Experiment, default_env, load_experiment, with_preset
from rlframe.programs.given import name_of
from rlframe.programs.options import with_options
from rlframe.programs.presets import Preset, find_preset

_PATHS = ("config", "run_dir", "token_file")


@dataclasses.dataclass(frozen=True)
class SessionOptions:
    """What does not reach the numbers of a run."""

    preset: str = "auto"  # auto: the one that fits the agent and environment; none; or a name (`rlframe agents`)
    config: Union[str, None] = None  # repeat the run of this config.json; other options change it
    run_dir: Union[str, None] = None  # where everything is written; None: a new directory under runs/
    resume: bool = False  # go on with the run in --run-dir from its latest checkpoint
    resume_from: Union[int, None] = None  # with --resume: go on from this one of RUN_DIR/checkpoints, not the newest
    take_over: bool = False  # with --resume: end the process that still writes to --run-dir, and go on in its place
    # port of /status, /metrics, /healthz and a live page; 0: a free one; None: nowhere; auto: 0 for elastic, else None
    http: Union[Literal["auto"], int, None] = "auto"
    http_host: str = "127.0.0.1"  # address that these listen at
    token_file: Union[str, None] = None  # the token of these; None: one that is made, RUN_DIR/token
    stop_at: Union[int, None] = None  # environment steps at which to stop and save; schedules still end at --steps
    quiet: bool = False  # show no progress
    profile: bool = False  # measure where the time goes and print it
    profile_trace: bool = False  # --profile, and a trace of JAX in RUN_DIR/trace
    wandb: bool = False  # log to Weights & Biases as well
    trackio: bool = False  # log to Trackio as well
    project: str = "rlframe"  # the project's name there


def read_session(options: Mapping[str, Any]) -> SessionOptions:
    """Session options that a script gives, with absolute paths. Raises UsageError where a type is wrong."""
    session = with_options(SessionOptions(), options)
    paths = {name: getattr(session, name) for name in _PATHS}
    return dataclasses.replace(session, **{name: os.path.abspath(path) for name, path in paths.items() if path})


def starting_point(
    agent: Any, env: Any, session: SessionOptions, network: Any = None
) -> tuple[Experiment, Preset | None]:
    """What other options change: the experiment that `config` or `resume` names, or the defaults, and their preset.

    Args:
        agent: a name or class; None: that of the saved experiment, or ppo.
        env: a name, class or function; None: the agent's default. The one of a saved experiment is left as it is,
            unless no file defines it.
        session: of which `preset`, `config`, `run_dir` and `resume` are read.
        network: a name or function, for a saved experiment whose own one no file defines.
    """
    agent, env, network = name_of("agent", agent), name_of("env", env), name_of("network", network)
    saved = _saved(session, {"agent": agent, "env": env, "network": network})
    if saved is not None:
        if agent is not None and agent != saved.agent:
            raise UsageError(f"The config is of the agent {saved.agent!r}: agent {agent!r} cannot replace it.")
        import_env(saved)
        return saved, None
    agent = agent or Experiment.agent
    env = env or default_env(agent)
    preset = find_preset(session.preset, agent, env)
    defaults = with_preset(preset, agent, env)
    import_env(defaults)
    return defaults, preset


def _saved(session: SessionOptions, given: Mapping[str, Any]) -> Experiment | None:
    if not session.resume:
        return load_experiment(session.config, given) if session.config is not None else None
    if session.run_dir is None:
        raise UsageError("resume needs run_dir: the directory of the run to go on with.")
    if session.config is not None:
        raise UsageError("resume goes on with the run's own config.json: leave config out.")
    if not (pathlib.Path(session.run_dir) / "config.json").is_file():
        raise UsageError(f"There is no run in {session.run_dir}: it has no config.json. Start it without resume.")
    return load_experiment(session.run_dir, given)
