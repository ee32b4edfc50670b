"""Checks of the steps of one copy against the spaces, and comparison of the episodes of two copies."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from dm_env import specs

from rlframe.envs.api_checks import wrapper_chain
from rlframe.programs.env_check.copies import Copy, Subject
from rlframe.programs.env_check.report import Findings
from rlframe.types import MultiDiscreteArray

_MIN_STEPS, _MAX_STEPS = 3, 1_000  # steps for the comparison of copies; the minimum is for very slow environments
_STEPS_KEPT = 200  # maximum number of steps that are compared with those of another seed
_MIN_STEPS_OF_SEEDS = 50  # minimum number of equal steps for a warning, because episodes may begin in the same way
_LONG = 10_000  # number of steps without an end for a warning
_TOLERANCE = 1e-5  # relative tolerance of the bounds of floats, which the codec rounds to float32
_SHORTEST_LIMIT = 50  # shortest episode for which equal lengths suggest a time limit
_SEED_FIX = (
    "Draw all random numbers from self.np_random after super().reset(seed=seed), or from a generator that reset() "
    "seeds; use no global generator (np.random, random), no clock, and no state that copies share."
)

Step = tuple[Any, ...]  # (step type, reward, discount, leaves of the observation ...)


def compare_copies(
    subject: Subject, first: Copy, check: Callable[[], None], seed: int, seconds: float, findings: Findings
) -> None:
    """Compare the episodes of equal seeds, and of different seeds.

    Args:
        subject: the environment.
        first: a copy that was not stepped yet.
        check: called after each step of the first copy.
        seed: seed of the first copy.
        seconds: time to play with the first copy.
        findings: receives the problems.
    """
    steps = _play(first, seconds, check)
    if subject.is_single:
        steps = iter(list(steps))  # there are no two copies, so play the same episodes one after the other
    second, kept = subject.open(seed), []
    takes_seed = not (subject.is_single and hasattr(subject.target, "observation_spec"))
    for count, (one, other) in enumerate(zip(steps, _play(second))):
        if count < _STEPS_KEPT:
            kept.append(one)
        place = _difference(one, other, first)
        if place and takes_seed:
            findings.error(
                "seed",
                "equal seeds and equal actions gave different episodes, so a run cannot be repeated",
                expected="equal observations, rewards and ends",
                received=f"another {place} after {count} steps and resets",
                fix=_SEED_FIX,
            )
            break
    third = subject.open(seed + 1)
    pairs = list(zip(kept, _play(third)))
    if takes_seed and len(pairs) >= _MIN_STEPS_OF_SEEDS and not any(_difference(*pair, first) for pair in pairs):
        findings.warn(
            "seed",
            "different seeds gave the same episodes",
            expected="other episodes, unless nothing in the environment is random",
            received=f"equal observations, rewards and ends in {len(pairs)} steps and resets",
            fix=f"If it should be random: use the seed of reset(). {_SEED_FIX}",
        )
    for copy in (second, third):
        copy.close(findings)


def _play(copy: Copy, seconds: float = np.inf, check: Callable[[], None] = lambda: None) -> Iterator[Step]:
    """Step a copy, and yield the steps, until the time is over. Call `check` after each step."""
    end = time.monotonic() + seconds
    for count in itertools.count():
        if count >= _MAX_STEPS or (count >= _MIN_STEPS and time.monotonic() > end):
            return
        timestep = copy.step()
        check()
        leaves = copy.pool.codec.layout.flatten(timestep.observation)
        yield timestep.step_type, timestep.reward, timestep.discount, *leaves


def _difference(one: Step, other: Step, copy: Copy) -> str:
    """Return the name of the first part in which two steps differ, or ""."""
    names = ["step type", "reward", "discount", *(leaf.spec.name for leaf in copy.pool.codec.leaves)]
    parts = zip(names, one, other)
    unequal = (name for name, ours, theirs in parts if not np.array_equal(ours, theirs, equal_nan=True))
    return next(unequal, "")


class StepChecks:
    """Checks the newest step of a copy: finite numbers, bounds and dtypes.

    Args:
        copy: the copy.
        findings: receives the problems.

    Attributes:
        largest: the largest absolute value in observations that are vectors of floats.
    """

    def __init__(self, copy: Copy, findings: Findings) -> None:
        self._copy, self._findings, self._layout = copy, findings, copy.pool.codec.layout
        self._specs: list[specs.Array] = self._layout.leaves
        self._dtypes = None if copy.recorder is None else [leaf.dtype for leaf in _declared(copy.recorder.env)]
        self._reward_spec = getattr(copy.recorder, "reward_spec", None)
        self.largest = 0.0

    def __call__(self) -> None:
        """Check the newest step."""
        timestep, copy = self._copy.timestep, self._copy
        assert timestep is not None
        self._check("reward", timestep.reward, self._reward_spec and self._reward_spec())
        for spec, leaf in zip(self._specs, self._layout.flatten(timestep.observation)):
            self._check(spec.name, leaf, spec)
            if leaf.dtype.kind == "f" and leaf.ndim == 2:
                self.largest = max(self.largest, float(np.abs(leaf).max()))
        if copy.recorder is None or self._dtypes is None:
            return
        for spec, value, dtype in zip(self._specs, self._layout.flatten(copy.recorder.observation), self._dtypes):
            received = np.asarray(value).dtype
            if received != dtype and not (received.kind == dtype.kind == "i"):
                self._findings.warn(
                    spec.name,
                    "its dtype is not that of its space, so each value is converted",
                    expected=str(dtype),
                    received=str(received),
                    fix=f"Return np.asarray(value, np.{dtype}), or change the dtype of the space.",
                )

    def _check(self, name: str, values: np.ndarray, spec: Any) -> None:
        where = f"after {self._copy.steps} steps"
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            self._findings.error(
                name,
                "it contains NaN or infinity",
                expected="finite numbers",
                received=f"{values[~np.isfinite(values)][0]} {where}",
                fix="Look for a division by zero, a logarithm of zero, or a simulation that diverged.",
            )
        if not isinstance(spec, specs.BoundedArray) or isinstance(spec, (specs.DiscreteArray, MultiDiscreteArray)):
            return  # the codec checks categories
        margin = _TOLERANCE if values.dtype.kind == "f" else 0
        low, high = (spec.minimum - margin * abs(spec.minimum), spec.maximum + margin * abs(spec.maximum))
        outside = (values < low - margin) | (values > high + margin)
        if outside.any():
            place = tuple(int(index[0]) for index in np.nonzero(outside))[1:]
            low, high = (np.broadcast_to(bound, values.shape[1:])[place] for bound in (spec.minimum, spec.maximum))
            self._findings.warn(
                name,
                "it lies outside the bounds of its space",
                expected=f"{low:.6g} to {high:.6g}" + (f" at {place}" if place else ""),
                received=f"{values[outside][0]:.6g} {where}",
                fix="Correct the bounds of the space, or clip the value.",
            )


def _declared(env: Any) -> Iterator[Any]:
    """Yield the spaces or specs of the leaves of an observation."""
    space = env.observation_space if hasattr(env, "observation_space") else env.observation_spec()
    return _leaves(space)


def _leaves(space: Any) -> Iterator[Any]:
    space = getattr(space, "spaces", space)
    if isinstance(space, (Mapping, Sequence)):
        for part in space.values() if isinstance(space, Mapping) else space:
            yield from _leaves(part)
    else:
        yield space


def check_actions(spec: Any, findings: Findings) -> None:
    """Warn if continuous actions have no bounds."""
    if spec.dtype.kind == "f" and not np.isfinite([spec.minimum, spec.maximum]).all():
        findings.warn(
            "action",
            "actions have no bounds, so agents cannot scale them, and SAC and TD3 cannot act",
            expected="a Box with finite bounds",
            received=f"bounds from {np.min(spec.minimum)} to {np.max(spec.maximum)}",
            fix="Set the bounds to the smallest and the largest useful action, such as Box(-1.0, 1.0, shape).",
        )


def check_ends(copies: Sequence[Copy], findings: Findings) -> None:
    """Check the ends of the episodes that the copies have played."""
    lengths = [length for copy in copies for length in copy.lengths]
    steps, terminated = sum(copy.steps for copy in copies), sum(copy.terminated for copy in copies)
    if not lengths and steps >= _LONG:
        findings.warn(
            "end",
            "no episode ended",
            expected="terminated or truncated after some steps",
            received=f"no end in {steps:,} steps with random actions",
            fix="Return terminated=True or truncated=True at the end, or wrap the environment in "
            "gymnasium.wrappers.TimeLimit(env, max_episode_steps=...).",
        )
    elif lengths and max(lengths) == 1:
        findings.warn(
            "end",
            "every episode ended at its first step",
            expected="episodes of several steps, unless each episode is one decision",
            received=f"{len(lengths)} episodes of one step",
            fix="Check the condition of terminated, and that reset() resets all of the state.",
        )
    elif len(lengths) > 2 and len({*lengths}) == 1 and terminated == len(lengths) and lengths[0] >= _SHORTEST_LIMIT:
        findings.warn(
            "end",
            "all episodes have the same length, and all are terminated",
            expected="truncated=True, terminated=False if a time limit ends the episodes",
            received=f"{len(lengths)} episodes of {lengths[0]} steps with terminated=True",
            fix="If it is a time limit, return truncated=True. With terminated=True, the agent learns that the last "
            "state is worth nothing.",
        )
    if lengths and not any(value for copy in copies for value in copy.returns):
        findings.warn(
            "reward",
            "random actions got no reward",
            expected="some reward, so that the agent can learn from its first episodes",
            received=f"a return of 0 in each of {len(lengths)} episodes",
            fix="Check the reward. If it is so rare on purpose, expect slow learning, or add rewards for progress.",
        )


def check_reset_in_step(copy: Copy, seconds: float, findings: Findings) -> None:
    """Warn if `step` calls `reset` at the end of an episode, because the last observation is then lost."""
    if copy.recorder is None or not copy.lengths:
        return
    calls: list[Any] = []
    layers = [layer for layer in wrapper_chain(copy.recorder.env) if hasattr(layer, "__dict__")]
    patched = [layer for layer in layers if "reset" not in vars(layer)]
    for layer in patched:
        layer.reset = functools.partial(_count, calls, layer.reset)
    try:
        end = time.monotonic() + seconds
        if copy.is_last:
            copy.step()  # the reset
        calls.clear()
        while not copy.is_last and time.monotonic() < end:
            copy.step()
    finally:
        for layer in patched:
            del layer.reset
    if calls:
        findings.warn(
            "end",
            "step() calls reset() at the end of an episode",
            expected="no reset in step(), because rlframe calls reset() after the last observation",
            received="a call of reset() in the step that ended an episode",
            fix="Leave reset() out of step(), and return the last observation of the episode. Agents learn from it.",
        )


def _count(calls: list[Any], function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    calls.append(function)
    return function(*args, **options)
