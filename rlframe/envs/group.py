"""`EnvGroup` steps several environments one after another. Pools of the types loop, thread and process use it."""

from __future__ import annotations

import abc
import functools
import itertools
import pickle
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlframe.envs import api_checks
from rlframe.envs.adapters import SingleEnv, pickle_with_state, wrap
from rlframe.envs.api_checks import EnvApiError
from rlframe.envs.checks import EnvOwnership, check_distinct
from rlframe.envs.codec import ObservationRows
from rlframe.envs.layout import BatchBuffer, BufferRing
from rlframe.envs.logs import EnvLog
from rlframe.errors import EnvError, RlframeError, UsageError
from rlframe.interprocess.heartbeat import SuspendAwareClock
from rlframe.metrics.rows import Sums, add_sums
from rlframe.types import FIRST, LAST, MID, TimeStep

if TYPE_CHECKING:
    from rlframe.envs.names import Builder

ANSWER_TIMEOUT = 600.0  # default maximum seconds of one step; after that, an environment counts as hung
POLL_INTERVAL = 0.5  # seconds between two checks that the workers are alive, while a pool waits for the workers

# Exceptions that count as errors of an environment. They include sys.exit(), but not Ctrl-C.
_ERRORS = (Exception, SystemExit)

EnvState = tuple[Any, bool, Any]  # (pickled environment, is at LAST, seed for its first reset or None)


class RemoteTraceback(Exception):
    """The cause of an EnvError. Its text is the traceback of the environment."""

    def __str__(self) -> str:
        return "\n" + "".join(str(arg) for arg in self.args)


class EnvGroup:
    """Several environments of a pool, which `step` steps one after another.

    Args:
      envs: environments with equal specs.
      seeds: the seed for the first reset of each environment.
      first_id: the id of the first environment, for error messages.
      action_repeat: number of steps for each action, until the episode ends. The rewards are summed.

    Attributes:
      current: [1] the index, in this group, of the environment that is being stepped or reset. It can be an array in
        shared memory.
    """

    def __init__(self, envs: list[SingleEnv], seeds: list[int], first_id: int, action_repeat: int = 1):
        self.envs = envs
        self.first_id = first_id
        self.current: Any = [0]
        self.log_to(EnvLog())
        self.codec = envs[0].codec
        self.layout = self.codec.layout
        self._seeds: list[int | None] = list(seeds)
        self._last = [True] * len(envs)  # a step before the first reset is a reset, as in dm_env
        self._action_repeat = action_repeat
        self._ownership = EnvOwnership()
        self._observations = ObservationRows(self.codec, first_id, len(envs))
        self._steppers = [_repeating(env.step, action_repeat) for env in envs]
        self._check_specs(envs)

    def log_to(self, log: EnvLog) -> None:
        """Write the numbers that the environments log to `log`."""
        self.log = log
        for i, env in enumerate(self.envs):
            env.log = functools.partial(log.add, self.first_id + i)

    def run(self, actions: np.ndarray | None, rows: BatchBuffer) -> None:
        """Step every environment, or reset every environment if `actions` is None."""
        if actions is None:
            self.reset(rows)
        else:
            self.step(actions, rows)

    def reset(self, rows: BatchBuffer) -> None:
        """Start a new episode in every environment."""
        self._ownership.lost = None
        for i in range(len(self.envs)):
            self.current[0] = i
            self.reset_one(i, rows, i)

    def step(self, actions: np.ndarray, rows: BatchBuffer) -> None:
        """Step every environment with its row of `actions` [n, ...]. If an environment is at LAST, reset it instead."""
        self._ownership.check()
        i, call = 0, "step"
        last, current, observations = self._last, self.current, self._observations
        rewards: list[Any] = []
        unusual: list[tuple[int, Any, float]] = []  # (row, step type, discount) of each timestep that is not (MID, 1.0)
        targets = observations.begin(rows.leaves)
        is_leaf, leaf, target = observations.is_leaf, observations.leaves[0], targets[0]
        accepted, shape = leaf.accepted_dtypes, leaf.shape
        try:
            for i, (step, action) in enumerate(zip(self._steppers, self.codec.decode(actions), strict=True)):
                current[0] = i
                if last[i]:
                    call = "reset"
                    observation, reward, last[i] = self._reset_env(i), 0.0, False
                    unusual.append((i, FIRST, 1.0))
                else:
                    call = "step"
                    observation, reward, discount, is_last = step(action)
                    if is_last or discount != 1.0:
                        last[i] = is_last
                        unusual.append((i, LAST if is_last else MID, discount))
                rewards.append(reward)
                if (
                    is_leaf
                    and type(observation) is np.ndarray
                    and observation.dtype in accepted
                    and observation.shape == shape
                ):
                    target[i] = observation
                else:
                    observations.write(i, observation, targets)
            observations.finish(targets, rows.leaves)
        except _ERRORS as error:
            raise self._explain(error, i, call) from error
        rows.reward[:] = self._numbers(rewards)
        rows.step_type.fill(MID)
        rows.discount.fill(1.0)
        for i, step_type, discount in unusual:
            rows.step_type[i], rows.discount[i] = step_type, discount

    def step_one(self, i: int, action: np.ndarray, rows: BatchBuffer, row: int) -> None:
        """Step the group's environment `i`, and write its timestep to row `row`."""
        if self._last[i]:
            self.reset_one(i, rows, row)
            return
        self._ownership.check()
        try:
            observation, reward, discount, self._last[i] = self._steppers[i](self.codec.decode(action[None])[0])
            rows.step_type[row] = 2 if self._last[i] else 1
            self._observations.write_one(i, observation, rows.leaves, row)
            rows.reward[row], rows.discount[row] = api_checks.number("reward", reward), discount
        except _ERRORS as error:
            raise self._explain(error, i, "step") from error

    def reset_one(self, i: int, rows: BatchBuffer, row: int) -> None:
        """Reset the group's environment `i`, and write its timestep to row `row`."""
        try:
            self._observations.write_one(i, self._reset_env(i), rows.leaves, row)
        except _ERRORS as error:
            raise self._explain(error, i, "reset") from error
        rows.step_type[row], rows.reward[row], rows.discount[row] = 0, 0.0, 1.0
        self._last[i] = False

    def get_state(self) -> list[EnvState] | None:
        """Return the state of each environment for `set_state`, or None if one of them cannot be saved."""
        pickled = [pickle_with_state(env.env) for env in self.envs]
        if any(one is None for one in pickled):
            return None
        return list(zip(pickled, self._last, self._seeds, strict=True))

    def set_state(self, states: list[EnvState]) -> None:
        """Replace every environment with its saved environment."""
        envs = [wrap(pickle.loads(pickled)) for pickled, _, _ in states]
        self._check_specs(envs)
        self.close()
        self.envs, self._ownership = envs, EnvOwnership()
        self._last = [last for _, last, _ in states]
        self._seeds = [seed for _, _, seed in states]
        self._steppers = [_repeating(env.step, self._action_repeat) for env in envs]
        self.log_to(self.log)

    def close(self) -> None:
        self._ownership = EnvOwnership()
        for env in self.envs:
            env.close()

    def _reset_env(self, i: int) -> Any:
        seed, self._seeds[i] = self._seeds[i], None
        observation = self.envs[i].reset(seed)
        self._ownership.take(self.envs[i].env)
        return observation

    def _numbers(self, rewards: list[Any]) -> Any:
        """Return the rewards of all environments as numbers that fit in float32."""
        numbers = api_checks.as_numbers(rewards)
        if numbers is not None:
            return numbers
        for i, reward in enumerate(rewards):
            try:
                rewards[i] = api_checks.number("reward", reward)
            except EnvApiError as error:
                raise self._explain(error, i, "step") from error
        return rewards

    def _check_specs(self, envs: list[SingleEnv]) -> None:
        for i, env in enumerate(envs):
            if env.codec != self.codec:
                raise different_specs_error(self.first_id, self.codec, self.first_id + i, env.codec)

    def _explain(self, error: BaseException, i: int, call: str) -> RlframeError:
        if isinstance(error, EnvApiError):
            return UsageError(f"Environment {self.first_id + i} {error}")
        if isinstance(error, RlframeError):
            return error
        sentence = f"Environment {self.first_id + i} raised {type(error).__name__} in {call}(): {error}"
        return env_error(sentence, "".join(traceback.format_exception(type(error), error, error.__traceback__)))


def env_error(sentence: str, traceback_text: str) -> EnvError:
    """Return an EnvError whose cause and whose attribute `traceback_text` contain the environment's traceback."""
    error = EnvError(sentence)
    error.traceback_text = traceback_text  # type: ignore[attr-defined]
    error.__cause__ = RemoteTraceback(traceback_text)
    return error


def describe_envs(slices: list[tuple[int, int]]) -> str:
    """Return a text such as "environments 0 to 3, 7" for the slices (start, stop) of environments."""
    parts = [f"{start} to {stop - 1}" if stop - start > 1 else str(start) for start, stop in slices]
    return f"environment{'s' if len(parts) > 1 or ' ' in parts[0] else ''} {', '.join(parts)}"


class StepWatch:
    """Detects environments that hang while a pool waits for its workers.

    Args:
      answer_timeout: maximum seconds of a step, from the first `check` in which the step is listed.
    """

    def __init__(self, answer_timeout: float):
        self._answer_timeout = answer_timeout
        self._clock = SuspendAwareClock()
        self._seen: dict[int, tuple[Any, float]] = {}  # worker -> (step, time of the first check with this step)

    def begin(self) -> None:
        """Forget the previous steps. The pool calls this after it sends new commands to its workers."""
        self._seen.clear()

    def check(self, steps: dict[int, tuple[int, Any]]) -> None:
        """Raise EnvError if an environment hangs.

        Args:
          steps: a dict of busy worker -> (id of the environment in the worker's step, a value that changes with each
            step).
        """
        now = self._clock.tick()
        self._seen = {
            worker: self._seen[worker] if self._seen.get(worker, (None,))[0] == task else (task, now)
            for worker, task in steps.items()
        }
        late = sorted(task[0] for task, since in self._seen.values() if now - since > self._answer_timeout)
        if late:
            raise timeout_error([(env_id, env_id + 1) for env_id in late], self._answer_timeout)


def timeout_error(slices: list[tuple[int, int]], seconds: float) -> EnvError:
    """Return the error for environments that hang."""
    hang = "it hangs" if len(slices) == 1 and slices[0][1] - slices[0][0] == 1 else "they hang"
    return EnvError(
        f"No answer from {describe_envs(slices)} within {seconds:g} s: {hang}. Correct the environment, or increase "
        "answer_timeout."
    )


def interrupted_error() -> EnvError:
    """Return the error for a pool that is used after a step was interrupted or failed."""
    return EnvError("This environment pool was interrupted or failed in a step: close it and make a new one.")


def different_specs_error(i: int, first: Any, j: int, other: Any) -> UsageError:
    """Return the error for a builder whose environments have different specs."""
    return UsageError(
        f"The builder returned environments with different specs: environment {i} has {first}, environment {j} has "
        f"{other}. All environments of a pool must have the same observation and action spec."
    )


def _repeating(step: Callable[[Any], Any], times: int) -> Callable[[Any], Any]:
    if times == 1:
        return step

    def step_repeatedly(action: Any) -> tuple[Any, float, float, bool]:
        rewards, total_discount = 0.0, 1.0
        for _ in range(times):
            observation, reward, discount, last = step(action)
            rewards += api_checks.number("reward", reward)
            total_discount *= discount
            if last:
                break
        return observation, rewards, total_discount, last

    return step_repeatedly


def build_group(build: Builder, start: int, stop: int) -> EnvGroup:
    """Build a group of the environments start .. stop - 1. If a build fails, close the environments built so far."""
    return build_groups(build, [(start, stop)])[0]


def build_groups(build: Builder, slices: list[tuple[int, int]]) -> list[EnvGroup]:
    """Build a group for each slice (start, stop). If a build fails, close the environments built so far."""
    envs: list[SingleEnv] = []
    first, last = slices[0][0], slices[-1][1]
    try:
        for index in range(first, last):
            envs.append(build(index))
        check_distinct([env.env for env in envs], first)
        return [
            EnvGroup(
                envs[start - first : stop - first],
                [build.seed_of(index) for index in range(start, stop)],
                start,
                build.action_repeat,
            )
            for start, stop in slices
        ]
    except BaseException:
        for env in envs:
            env.close()
        raise


class GroupPool(abc.ABC):
    """A pool with groups of environments in this process. A subclass decides which thread steps each group.

    Args:
      groups: groups with consecutive environment ids.
    """

    def __init__(self, groups: list[EnvGroup]):
        self._groups = groups
        self._slices = [(group.first_id, group.first_id + len(group.envs)) for group in groups]
        self.num_envs = self._slices[-1][1]
        self.codec = groups[0].codec
        self._ring = BufferRing(groups[0].layout, self.num_envs, self._slices)

    def reset(self) -> TimeStep:
        return self._run(None)

    def step(self, actions: np.ndarray) -> TimeStep:
        return self._run(actions)

    def get_state(self) -> list[EnvState] | None:
        return concatenate_states([group.get_state() for group in self._groups])

    def set_state(self, states: list[EnvState]) -> None:
        for group, (start, stop) in zip(self._groups, self._slices, strict=True):
            group.set_state(states[start:stop])

    def sums(self) -> Sums:
        return add_sums(group.log.sums() for group in self._groups)

    def progress(self) -> Any:
        return [group.current[0] for group in self._groups]

    @abc.abstractmethod
    def _run(self, actions: np.ndarray | None) -> TimeStep:
        """Step all environments, or reset all environments if `actions` is None."""


class LoopPool(GroupPool):
    """`type='loop'`: steps one group of environments in the caller's thread."""

    def __init__(self, group: EnvGroup):
        super().__init__([group])

    def _run(self, actions: np.ndarray | None) -> TimeStep:
        buffer = self._ring.take()
        self._groups[0].run(actions, buffer.rows(0, self.num_envs))
        return buffer.timestep()

    def close(self) -> None:
        self._groups[0].close()


def concatenate_states(parts: list[list[EnvState] | None]) -> list[EnvState] | None:
    """Return the states of all environments of a pool, or None if an environment cannot be saved."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return list(itertools.chain.from_iterable(known))
