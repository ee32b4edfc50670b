"""`check_env`: check an environment before the first training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from dm_env import specs

from rlframe.errors import RlframeError, UsageError
from rlframe.programs.env_check.copies import Copy, Subject
from rlframe.programs.env_check.episodes import (
    StepChecks,
    check_actions,
    check_ends,
    check_reset_in_step,
    compare_copies,
)
from rlframe.programs.env_check.report import CheckReport, Findings, Problem, Recommendation
from rlframe.programs.env_check.speed import measure_growth, measure_pools, recommend
from rlframe.programs.experiment import MAX_SEED, Experiment


def check_env(
    env: Any,
    env_kwargs: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    num_envs: int | None = None,
    seconds: float = 2.0,
) -> CheckReport:
    """Check an environment, and recommend a pool and a training command. `print` the result.

    The checks play episodes with random actions. They cover: spaces, dtypes, shapes and bounds; NaN; equal episodes for
    equal seeds; resets and ends of episodes; pickling; time per step; growth of memory.

    Args:
        env: a name that `rlframe envs` lists, `file.py:make_env`, a class or function that makes an environment, or one
            environment. One environment is checked less: there are no copies to compare, and no workers.
        env_kwargs: keyword arguments of the environment.
        seed: seed of the environment.
        num_envs: number of environments of the later run. None means the default of `rlframe train`.
        seconds: time for each of the longer checks. Long episodes need more.

    Returns:
        The report: `ok`, `problems`, `measurements`, `recommendation`, `to_json()`.

    Raises:
        UsageError: the environment does not exist, or an argument is invalid. All other problems are in the report.
    """
    if num_envs is not None and num_envs < 1:
        raise UsageError(f"num_envs must be at least 1, got {num_envs}.")
    if not 0 <= seed <= MAX_SEED:
        raise UsageError(f"seed must be between 0 and {MAX_SEED}, got {seed}.")
    if not seconds > 0:
        raise UsageError(f"seconds must be above 0, got {seconds}.")
    size = num_envs or Experiment.num_envs
    subject, findings = Subject(env, env_kwargs, size), Findings()
    measured: dict[str, Any] = {}
    copies: list[Copy] = []
    recommendation: Recommendation | None = None
    check = "spaces"  # the current check, for errors
    try:
        copies.append(subject.open(seed))
        codec, step_checks = copies[0].pool.codec, StepChecks(copies[0], findings)
        measured["observation"] = "; ".join(map(_describe_leaf, codec.layout.leaves))
        measured["action"] = _describe(codec.action_spec)
        check_actions(codec.action_spec, findings)
        check = "episodes"
        compare_copies(subject, copies[0], step_checks, seed, seconds / 2, findings)
        if subject.is_single:
            copies.append(subject.open(seed))  # the comparison has used the environment in other pools
        timed = copies[-1]
        measured["bytes_per_step"] = measure_growth(timed, seconds, findings)
        measured |= _summary(copies)
        check_ends(copies, findings)
        check_reset_in_step(timed, seconds, findings)
        if not findings.has_errors:
            check = "pools"
            speeds = measured["steps_per_second"] = measure_pools(subject, timed, size, seed, seconds / 4, findings)
            options = {"env_kwargs": subject.kwargs, "num_envs": num_envs}
            recommendation = recommend(subject, codec, speeds, step_checks.largest, options, findings)
    except RlframeError as error:
        findings.add(Problem.of_error(check, error))
    for copy in copies:
        copy.close(findings)
    return CheckReport(subject.label, findings.sorted(), measured, recommendation)


def _summary(copies: Sequence[Copy]) -> dict[str, Any]:
    """Return the numbers of steps and episodes, the lengths and returns of the episodes, and the times of calls."""
    lengths = [length for copy in copies for length in copy.lengths]
    terminated, recorder = sum(copy.terminated for copy in copies), copies[-1].recorder
    return {
        "steps": sum(copy.steps for copy in copies),
        "episodes": len(lengths),
        "terminated": terminated,
        "truncated": len(lengths) - terminated,
        "length": _range(lengths),
        "return": _range([value for copy in copies for value in copy.returns]),
        "seconds_per_step": None if recorder is None else recorder.seconds_per("step"),
        "seconds_per_reset": None if recorder is None else recorder.seconds_per("reset"),
    }


def _range(values: Sequence[float]) -> list[float] | None:
    """Return [minimum, mean, maximum], or None without values."""
    return [float(reduce(values)) for reduce in (np.min, np.mean, np.max)] if values else None


def _describe(spec: Any) -> str:
    """Return a dtype, a shape and bounds, such as "float32[4] from -1 to 1"."""
    if isinstance(spec, specs.DiscreteArray):
        return f"integers from 0 to {spec.num_values - 1}"
    text = f"{spec.dtype}{list(spec.shape)}"
    is_bounded = isinstance(spec, specs.BoundedArray)
    return f"{text} from {np.min(spec.minimum):.6g} to {np.max(spec.maximum):.6g}" if is_bounded else text


def _describe_leaf(spec: Any) -> str:
    """Return the path of a leaf inside the observation, and its description."""
    return f"{spec.name.removeprefix('observation').removeprefix('.')} {_describe(spec)}".strip()
