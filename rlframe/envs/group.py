"""A few environments stepped one after another: the part that `loop`, `thread` and `process` pools share."""

from __future__ import annotations

import abc
import functools
import pickle
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlframe.envs import api_checks, snapshot
from rlframe.envs.adapters import SingleEnv, wrap
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

ANSWER_TIMEOUT = 600.0  # seconds that an environment may take for one step before it counts as hung, by default
POLL_INTERVAL = 0.5  # seconds between looks at whether those that a pool waits for are alive

# An environment that calls sys.exit() failed; Ctrl-C is no error of an environment.
_ERRORS = (Exception, SystemExit)

EnvState = tuple[Any, bool, Any]  # (pickled environment, whether it was LAST, the seed if not yet given to it)


class RemoteTraceback(Exception):
    """The traceback of an environment as text, shown as the cause of the EnvError that it led to."""

    def __str__(self) -> str:
        return "\n" + "".join(str(arg) for arg in self.args)


class EnvGroup:
    """The environments `first_id .. first_id + len(envs)` of a pool.

    Args:
      envs: all with the same specs.
      seeds: one for each, given to its first reset.
      first_id: the index in the pool of the first one; errors name the environments by it.
      action_repeat: how often each action is taken, up to the end of an episode; rewards add up.

    Attributes:
      at: [1] the place in this group of the environment that is being stepped or reset; may lie in shared memory.
    """

    def __init__(self, envs: list[SingleEnv], seeds: list[int], first_id: int, action_repeat: int = 1):
        self.envs = envs
        self.first_id = first_id
        self.at: Any = [0]
        self.log_to(EnvLog())
        self.codec = envs[0].codec
        self.layout = self.codec.layout
        self._seeds: list[int | None] = list(seeds)
        self._last = [True] * len(envs)  # so a step before any reset is a reset, as dm_env has it
        self._action_repeat = action_repeat
        self._ownership = EnvOwnership()
        self._observations = ObservationRows(self.codec, first_id, len(envs))
        self._steppers = [_repeating(env.step, action_repeat) for env in envs]
        self._check_specs(envs)

    def log_to(self, log: EnvLog) -> None:
        """Has the environments log there from now on."""
        self.log = log
        for i, env in enumerate(self.envs):
            env.log = functools.partial(log.add, self.first_id + i)

    def run(self, actions: np.ndarray | None, rows: BatchBuffer) -> None:
        """Step every environment, or reset them if there are no actions."""
        if actions is None:
            self.reset(rows)
        else:
            self.step(actions, rows)

    def reset(self, rows: BatchBuffer) -> None:
        """Starts a new episode in every environment."""
        self._ownership.taken = None
        for i in range(len(self.envs)):
            self.at[0] = i
            self.reset_one(i, rows, i)

    def step(self, actions: np.ndarray, rows: BatchBuffer) -> None:
        """Steps every environment with its row of `actions` [n, ...]; resets those that were LAST instead."""
        self._ownership.check()
        i, call = 0, "step"
        last, at, observations = self._last, self.at, self._observations
        rewards: list[Any] = []
        unusual: list[tuple[int, Any, float]] = []  # (row, step type, discount) of all that are not (MID, 1)
        targets = observations.begin(rows.leaves)
        is_leaf, leaf, target = observations.is_leaf, observations.leaves[0], targets[0]
        taken, shape = leaf.taken, leaf.shape
        try:
            for i, (step, action) in enumerate(zip(self._steppers, self.codec.decode(actions), strict=True)):
                at[0] = i
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
                    and observation.dtype in taken
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
        """Steps environment i (counted in this group) alone and writes row `row`."""
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
        """Resets environment i (counted in this group) and writes row `row`."""
        try:
            self._observations.write_one(i, self._reset_env(i), rows.leaves, row)
        except _ERRORS as error:
            raise self._explain(error, i, "reset") from error
        rows.step_type[row], rows.reward[row], rows.discount[row] = 0, 0.0, 1.0
        self._last[i] = False

    def get_state(self) -> list[EnvState] | None:
        """What `set_state` needs for each environment, or None where one of them cannot save its state."""
        pickled = [snapshot.dump(env.env) for env in self.envs]
        if any(one is None for one in pickled):
            return None
        return list(zip(pickled, self._last, self._seeds, strict=True))

    def set_state(self, states: list[EnvState]) -> None:
        """Replaces every environment by the saved one, which continues where it was."""
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
        """The rewards of all environments, as numbers that fit in float32."""
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
    """An EnvError that carries the environment's traceback as its cause and as `traceback_text`."""
    error = EnvError(sentence)
    error.traceback_text = traceback_text  # type: ignore[attr-defined]
    error.__cause__ = RemoteTraceback(traceback_text)
    return error


def span(slices: list[tuple[int, int]]) -> str:
    """The environments start .. stop - 1 of each slice, in words."""
    parts = [f"{start} to {stop - 1}" if stop - start > 1 else str(start) for start, stop in slices]
    return f"environment{'s' if len(parts) > 1 or ' ' in parts[0] else ''} {', '.join(parts)}"


class StepWatch:
    """Finds the environments that hang, while a pool waits for workers which step theirs one after another.

    Args:
      answer_timeout: seconds that each environment has, from the look that first sees it stepped.
    """

    def __init__(self, answer_timeout: float):
        self._answer_timeout = answer_timeout
        self._clock = SuspendAwareClock()
        self._seen: dict[int, tuple[Any, float]] = {}  # by worker: (what it is at, since when by the clock)

    def begin(self) -> None:
        """The workers were given something to do."""
        self._seen.clear()

    def look(self, at: dict[int, tuple[int, Any]]) -> None:
        """Raises EnvError where an environment hangs.

        Args:
          at: of each worker that is at work: (the environment that it steps, what is another value in its next step).
        """
        now = self._clock.tick()
        self._seen = {
            worker: self._seen[worker] if self._seen.get(worker, (None,))[0] == task else (task, now)
            for worker, task in at.items()
        }
        late = sorted(task[0] for task, since in self._seen.values() if now - since > self._answer_timeout)
        if late:
            raise timeout_error([(env_id, env_id + 1) for env_id in late], self._answer_timeout)


def timeout_error(slices: list[tuple[int, int]], seconds: float) -> EnvError:
    """The error for environments that do not answer."""
    who = "it hangs" if len(slices) == 1 and slices[0][1] - slices[0][0] == 1 else "they hang"
    return EnvError(
        f"No answer from {span(slices)} within {seconds:g} s: {who}. Correct what hangs, or allow a step more time by "
        "answer_timeout."
    )


def interrupted() -> EnvError:
    """The error for a pool that is used again after a step that was not waited for to its end."""
    return EnvError("This environment pool was interrupted or failed in a step: close it and make a new one.")


def different_specs_error(i: int, wanted: Any, j: int, came: Any) -> UsageError:
    """The error for a builder whose environments are not alike."""
    return UsageError(
        f"The builder gave environments with different specs: environment {i} has {wanted}, environment {j} has "
        f"{came}. All environments of a pool must have the same observation and action spec."
    )


def _repeating(step: Callable[[Any], Any], times: int) -> Callable[[Any], Any]:
    if times == 1:
        return step

    def step_on(action: Any) -> tuple[Any, float, float, bool]:
        rewards, left = 0.0, 1.0
        for _ in range(times):
            observation, reward, discount, last = step(action)
            rewards += api_checks.number("reward", reward)
            left *= discount
            if last:
                break
        return observation, rewards, left, last

    return step_on


def build_group(build: Builder, start: int, stop: int) -> EnvGroup:
    """Builds the environments start .. stop; closes those that were built if one of them fails."""
    return build_groups(build, [(start, stop)])[0]


def build_groups(build: Builder, slices: list[tuple[int, int]]) -> list[EnvGroup]:
    """Build a group of environments for each slice (start, stop). If one fails, close all that were built."""
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
    """A pool of groups of environments in this process. A subclass decides which threads step them.

    Args:
      groups: consecutive ones.
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
        return [group.at[0] for group in self._groups]

    @abc.abstractmethod
    def _run(self, actions: np.ndarray | None) -> TimeStep:
        """Step all environments, or reset them if there are no actions."""


class LoopPool(GroupPool):
    """`type='loop'`: steps one group of environments in the caller's thread."""

    def __init__(self, group: EnvGroup):
        super().__init__([group])

    def _run(self, actions: np.ndarray | None) -> TimeStep:
        frame = self._ring.take()
        self._groups[0].run(actions, frame.rows(0, self.num_envs))
        return frame.timestep()

    def close(self) -> None:
        self._groups[0].close()


def concatenate_states(parts: list[list[EnvState] | None]) -> list[EnvState] | None:
    """The states of all environments of a pool; None if those of one part cannot be saved."""
    states: list[EnvState] = []
    for part in parts:
        if part is None:
            return None
        states += part
    return states
