"""Measurements of a checked environment: time of steps, growth of memory, and the speed of pools."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import time
from typing import Any

import numpy as np
import psutil

from rlframe.envs import SyncEnv
from rlframe.envs.names import Builder
from rlframe.envs.worker_processes import pickle_builder
from rlframe.errors import RlframeError
from rlframe.programs.env_check.copies import Copy, Subject, random_actions
from rlframe.programs.env_check.report import Findings

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
