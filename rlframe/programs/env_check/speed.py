"""Measurements of a checked environment: time of steps, growth of memory, and the speed of pools.

`recommend` turns them into a pool, an agent and a training command.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import shlex
import time
from typing import Any

import numpy as np
import psutil
from dm_env import specs

from rlframe.envs import SyncEnv
from rlframe.envs.codec import Codec
from rlframe.envs.names import Builder
from rlframe.envs.worker_processes import pickle_builder
from rlframe.errors import RlframeError, UsageError
from rlframe.programs.env_check.copies import Copy, Subject, random_actions
from rlframe.programs.env_check.report import Findings, Recommendation
from rlframe.programs.experiment import Experiment
from rlframe.programs.options.make_experiment import make_experiment
from rlframe.programs.presets import find_preset
from rlframe.programs.topologies.makers import make_agent
from rlframe.types import MultiDiscreteArray

_PARTS = 5  # the memory is measured after each part; the first part is the warm-up
_MIN_STEPS = 3  # minimum number of steps in each measurement, for very slow environments
_MIN_GROWTH = 2**20  # bytes; smaller growth is noise
_MIN_BYTES_PER_STEP = 256
_WORKER_TIMEOUT = 60.0  # seconds that a step may take in a worker
# Faster environments lose more time by waking workers than they gain (docs/project/speed.md).
_MIN_SECONDS_FOR_WORKERS = 1e-4
_MIN_GAIN = 1.2  # speed of another pool, relative to a loop, for which it is recommended


def measure_growth(copy: Copy, seconds: float, findings: Findings) -> int:
    """Step a copy for some seconds. Return by how many bytes the process grows per step, or 0 for less than noise."""
    marks: list[tuple[int, int]] = []  # (steps, bytes) after each part
    process, start = psutil.Process(), time.monotonic()
    for part in range(1, _PARTS + 1):
        least = copy.steps + _MIN_STEPS
        while copy.steps < least or time.monotonic() < start + seconds * part / _PARTS:
            copy.step()
        gc.collect()
        marks.append((copy.steps, process.memory_info().rss))
    grown = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in itertools.pairwise(marks)]
    per_step = int(np.median(grown))  # the median, because the process may free other memory at any time
    if per_step < _MIN_BYTES_PER_STEP or marks[-1][1] - marks[0][1] < _MIN_GROWTH:
        return 0
    findings.warn(
        "memory",
        "the memory grows with each step",
        expected="constant memory after the first episodes",
        received=f"{per_step:,} bytes per step, which is {per_step / 1e3:,.1f} GB in a million steps",
        fix="Look for a list, cache or log that grows, and clear it in reset().",
    )
    return per_step


def measure_pools(
    subject: Subject, copy: Copy, num_envs: int, seed: int, seconds: float, findings: Findings
) -> dict[str, float]:
    """Measure pools that may be fast, each for some seconds. Return type -> steps per second, default type first."""
    if subject.is_single:
        return {"loop": 1.0 / max(_seconds_per_step(copy), 1e-9)}
    speeds = {subject.type: _pool_speed(subject, num_envs, subject.type, seed, None, seconds)}
    if subject.type != "loop":
        return speeds
    workers = num_workers(num_envs)
    is_slow = workers > 1 and _seconds_per_step(copy) >= _MIN_SECONDS_FOR_WORKERS
    for kind in ("thread", "process"):
        try:
            if kind == "process":
                pickle_builder(Builder(subject.target, seed, subject.kwargs))
            if is_slow:
                speeds[kind] = _pool_speed(subject, num_envs, kind, seed, workers, seconds)
        except RlframeError as error:
            findings.warn(
                "workers",
                f"the environment does not work with --env-type {kind}",
                expected=f"the same steps in a {kind} as in this one",
                received=str(error),
                fix="Correct this if you want parallel environments. --env-type loop works.",
            )
    return speeds


def fastest_pool(speeds: dict[str, float]) -> str:
    """Return the fastest type. The first one is the simplest, so another one must be clearly faster."""
    first = next(iter(speeds))
    best = max(speeds, key=speeds.__getitem__)
    return best if speeds[best] >= _MIN_GAIN * speeds[first] else first


def num_workers(num_envs: int) -> int:
    """Return the number of workers that a pool of `num_envs` environments has by default."""
    return min(num_envs, len(os.sched_getaffinity(0)))


def _seconds_per_step(copy: Copy) -> float:
    return (copy.recorder and copy.recorder.seconds_per("step")) or 0.0


def _pool_speed(subject: Subject, num_envs: int, kind: str, seed: int, workers: int | None, seconds: float) -> float:
    """Return the steps per second of all environments of a pool."""
    options: dict[str, Any] = {"num_workers": workers, "env_kwargs": subject.kwargs, "check_finite": False}
    rng, spent, steps = np.random.default_rng(0), 0.0, 0
    made = SyncEnv(subject.target, num_envs, kind, seed=seed, answer_timeout=_WORKER_TIMEOUT, **options)
    with contextlib.closing(made) as pool:
        timestep = pool.reset()
        timestep = pool.step(random_actions(pool.action_spec, timestep, rng, 0))  # the first step may compile
        while steps < _MIN_STEPS or spent < seconds:
            actions = random_actions(pool.action_spec, timestep, rng, steps)
            start = time.perf_counter()
            timestep = pool.step(actions)
            spent += time.perf_counter() - start
            steps += 1
    return num_envs * steps / spent


_SLOW = 1_000.0  # steps per second below which an agent that reuses its steps is recommended
_LARGE = 10.0  # absolute value above which observations need normalization


def recommend(
    subject: Subject,
    codec: Codec,
    speeds: dict[str, float],
    largest: float,
    options: dict[str, Any],
    findings: Findings,
) -> Recommendation | None:
    """Return the recommended pool and training command. Return None, and add an error, if no agent can act here.

    Args:
        subject: the environment.
        codec: its codec.
        speeds: steps per second of each pool.
        largest: the largest absolute value in observations that are vectors.
        options: `env_kwargs` and `num_envs`, as the user gave them.
        findings: receives the problem.
    """
    kind = fastest_pool(speeds)
    workers = num_workers(options["num_envs"] or Experiment.num_envs) if kind in ("thread", "process") else None
    refused: UsageError | None = None
    for agent in _agents(codec.action_spec, subject, speeds[kind]):
        chosen = {name: value for name, value in options.items() if value}
        chosen |= {"topology": "fused"} if kind == "jax" else {"env_type": kind}
        chosen |= {} if workers is None else {"num_workers": workers}
        if largest > _LARGE and not _has_own_preset(agent, subject):
            chosen["normalize_observations"] = True
        try:
            experiment = make_experiment(agent, subject.name or subject.env, **chosen)
            make_agent(experiment, codec)
        except UsageError as error:
            refused = refused or error
            continue
        return Recommendation(kind, workers, agent, _command(subject, agent, {**chosen, "steps": experiment.steps}))
    findings.error(
        "action",
        "no agent of rlframe can act in this environment",
        expected="a Discrete, MultiDiscrete or bounded Box action space",
        received=str(refused),
        fix="Wrap the environment so that its action space is one of these.",
    )
    return None


def _agents(spec: Any, subject: Subject, speed: float) -> list[str]:
    """Return agents for an action space, best first. Agents with a preset for the environment come first."""
    if isinstance(spec, MultiDiscreteArray) or spec.dtype.kind != "f":
        agents = ["ppo", "dqn"] if not isinstance(spec, specs.DiscreteArray) or speed >= _SLOW else ["dqn", "ppo"]
    else:
        agents = (
            ["ppo", "sac"] if speed >= _SLOW or not np.isfinite([spec.minimum, spec.maximum]).all() else ["sac", "ppo"]
        )
    return sorted(agents, key=lambda agent: not _has_own_preset(agent, subject))


def _has_own_preset(agent: str, subject: Subject) -> bool:
    """Return True if the agent has a preset for this environment, other than its general preset."""
    preset = find_preset("auto", agent, subject.name or "")
    return preset is not None and not preset.is_general


def _command(subject: Subject, agent: str, chosen: dict[str, Any]) -> str:
    """Return the command for a shell, or Python code for an environment without a name."""
    if subject.name is None:
        given = "".join(f", {name}={value!r}" for name, value in chosen.items())
        label = subject.label if subject.label.isidentifier() else "make_env"
        return f"rlframe.train({agent!r}, {label}{given})"
    words = ["rlframe", "train", "--agent", agent, "--env", subject.name]
    for name, value in chosen.items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag] if value is True else [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return shlex.join(words)
