"""An actor and its replay buffer: the claim of a rank, and waits before a step.

An actor waits for a higher step budget, or, with an on-policy agent, for newer parameters. `AddOnlyWriter` adapts
buffers that only have `add`.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from rlframe import handles
from rlframe.errors import NoMethodError, RemoteError, UsageError
from rlframe.inferencers.base import count_positional
from rlframe.replay import BaseReplayBuffer, as_replay_buffer
from rlframe.types import ReplaySpec, Sequence, Step

_log = logging.getLogger(__name__)

_POLL = 0.2  # maximum seconds of one wait; a stop request takes effect within this time
_RESTARTED = 1.0  # If the version stays lower than before for this time (in seconds), the learner was restarted.


class UnrollGate:
    """Makes the actor wait before each unroll until its parameters are new enough.

    The gate closes after each unroll. The learner uses one unroll per version, so it learns from the next unroll one
    version later. The gate waits for parameters that are at most `max_staleness` versions old at that time.
    They never arrive if a replay server lost the unroll, or if the learner was restarted. Therefore the gate opens
    after 3 * `spec.lapse_after` seconds, and the next unroll uses the newest parameters.

    Args:
        spec: spec of the replay, with a `max_staleness`.

    Attributes:
        is_closed: True if the next step must wait: call `wait_until_open` first.
    """

    def __init__(self, spec: ReplaySpec) -> None:
        assert isinstance(spec.item, Sequence) and spec.max_staleness is not None
        self._length, self._max_staleness = spec.item.length, spec.max_staleness
        self._patience = 3 * spec.lapse_after  # maximum wait in seconds; a learner waits less for a missing actor
        self._steps = 0  # steps taken in the current unroll
        self._version = -1  # parameter version that acted in the first step of the unroll
        self._learned_at = -1  # parameter version of the learner when it learns from the unroll
        self.is_closed = False
        self._waited = 0.0  # seconds that the actor has waited for the next unroll

    def count_step(self, version: int) -> None:
        """Count a step that used the parameters of `version`."""
        if self._steps == 0:
            # The first step has the oldest version of the unroll.
            # If the learner has continued without this actor, `version` is larger than `_learned_at` + 1.
            self._version, self._learned_at = version, max(version, self._learned_at + 1)
        self._steps = (self._steps + 1) % self._length
        self.is_closed = self._steps == 0 and self._version <= self.too_old

    @property
    def too_old(self) -> int:
        """The newest version that is too old to act in the next unroll."""
        return self._learned_at - self._max_staleness

    def open_for(self, version: int) -> None:
        """Open the gate if `version` is new enough for the next unroll."""
        self.is_closed = self.is_closed and version <= self.too_old

    def wait_until_open(self, inferencer: Any, stop: threading.Event, until: float = math.inf) -> int:
        """Wait until the next unroll may start or `stop` is set. Return the newest known version.

        The wait also ends at the time `until` (of `time.monotonic()`). If the gate is still closed then, call this
        method again.
        """
        began, version, before = time.monotonic(), -1, self._waited
        while not stop.is_set():
            version = inferencer.wait_for_version(self.too_old, min(_POLL, max(0.0, until - time.monotonic())))
            if version > self.too_old:
                break
            now = time.monotonic()
            self._waited = before + now - began
            if self._waited > self._patience or (version < self._version and self._waited > _RESTARTED):
                _log.warning(
                    "No version after %d arrived within %.1f s. Continuing without a newer version.",
                    version,
                    self._waited,
                )
                self._learned_at = version - 1
                break
            if now >= until:
                return version
        self.is_closed, self._waited = False, 0.0
        return version


class StepBudget:
    """The total number of environment steps that `Actor.run` may take. Another thread may raise it.

    Args:
        steps: initial budget.
        num_envs: maximum number of environment steps in one step of the Actor.
        taken: a function that returns the number of steps taken so far.
    """

    def __init__(self, steps: float, num_envs: int, taken: Callable[[], int]) -> None:
        self._steps, self._num_envs, self._taken = steps, num_envs, taken
        self._at_most = 0  # upper bound of the number of steps taken
        self._changed = threading.Event()

    def allow(self, steps: float) -> None:
        """Set the budget to `steps` in total. Any thread may call it."""
        self._steps = steps
        self._changed.set()

    def take(self) -> bool:
        """Add one step of every environment to the count. Return False if the budget is used up.

        The count may be too high, because an environment that resets takes no step. At the limit, the count is
        replaced with the exact value of `taken`, which is slower to compute.
        """
        self._at_most += self._num_envs
        if self._at_most >= self._steps:
            self._at_most = self._taken()
        return self._at_most < self._steps

    def wait(self) -> None:
        """If the budget is used up, wait up to 0.2 s for a higher budget."""
        self._changed.clear()
        if self._taken() >= self._steps:
            self._changed.wait(_POLL)


_ONE_ARGUMENT = "add() takes 2 positional arguments but 3 were given"  # Python's error message. It counts `self`.


class ActorReplay:
    """The replay buffer of an Actor, and the rank that the Actor claims from it.

    A `ReplayWriter` in this process or on another node assigns ranks. A buffer that only has `add` assigns no ranks.
    `AddOnlyWriter` then assigns them.

    Args:
        target: a buffer, a `Remote` of one, or a `reverb.Client`.
        specs: see `as_replay_buffer`.
        rank: rank to claim. None claims any free rank. With a buffer that only has `add`, None means rank 0, and is
            only allowed if the process has no other Actor and is not a node of a program.
        incarnation: continue as this incarnation of `rank`, whose open fragments are in the buffer. None claims the
            rank.

    Attributes:
        rank: rank of the Actor.
        incarnation: incarnation of the Actor.
        writer: receives the steps.

    Raises:
        UsageError: the buffer has no `add`, or it only has `add` and other Actors may have the same rank.
    """

    def __init__(self, target: Any, specs: Callable[[], Any], rank: int | None, incarnation: int | None) -> None:
        self.writer = as_replay_buffer(target, specs)
        self._is_own = self.writer is not target
        self._is_remote = isinstance(target, handles.Remote)
        self._continues = incarnation is not None
        if rank is not None and incarnation is not None:
            self.rank, self.incarnation = rank, incarnation
        else:
            self.rank, self.incarnation = self._claim(rank)

    def _claim(self, rank: int | None) -> tuple[int, int]:
        buffer = self.writer
        if not callable(getattr(buffer, "add", None)):
            raise UsageError(
                f"A {type(buffer).__name__} was given as the replay buffer of an Actor: it needs add(env_ids, step)."
            )
        if hasattr(buffer, "claim_rank"):  # a Remote appears to have every method until that method is called
            with contextlib.suppress(NoMethodError):
                return buffer.claim_rank(rank=rank)
        if rank is None and (self._is_remote or handles.program_stop_event() is not None):
            raise UsageError(
                "The replay buffer has add() but no claim_rank(), so it hands out no ranks. An Actor without a rank "
                "would be rank 0, like the Actors of other processes: all would have the same seeds and collect the "
                "same experience. Give each Actor its own rank: Actor(..., rank=0), Actor(..., rank=1)."
            )
        self.writer = AddOnlyWriter(buffer, rank)
        return rank or 0, self.writer.incarnation

    def open_segment(self, num_envs: int) -> None:
        """Register the Actor with its number of environments, unless it continues an incarnation."""
        if not self._continues:
            self.writer.open_segment(self.rank, num_envs)

    def spec(self, inferencer: Any) -> ReplaySpec | None:
        """Return the spec of the buffer (of the inferencer if the buffer is remote), or None for an `AddOnlyWriter`."""
        if self._is_remote and not isinstance(self.writer, AddOnlyWriter):
            return inferencer.specs().replay_spec
        return getattr(self.writer, "spec", None)

    def end_waits(self) -> None:
        """Make each `add`, now and later, raise StoppedError instead of waiting for free space.

        If this object created the buffer, close the buffer.
        """
        if self._is_own:
            self.writer.close()
        elif isinstance(self.writer, BaseReplayBuffer):
            self.writer.end_waits(self.rank)

    def release(self) -> None:
        """Release the rank if this process assigned it."""
        if isinstance(self.writer, AddOnlyWriter):
            self.writer.release()


class _Claims:
    """The ranks of all Actors in this process that add to the same object."""

    def __init__(self, target: Any) -> None:
        key = id(target)
        try:
            self.target: Any = weakref.ref(target, lambda _: _claims.pop(key, None))
        except TypeError:  # The object allows no weak references. Keep it alive, so that no other object gets its id.
            self.target = target
        self.open: list[int | None] = []  # `rank` arguments of the Actors that are not closed
        self.incarnations = collections.Counter[int]()  # next incarnation of each rank


_claims: dict[int, _Claims] = {}  # keys: `id` of the object that the Actors add to
_CLAIMING = threading.Lock()


class AddOnlyWriter:
    """A `ReplayWriter` around an object that only has `add(env_ids, step)` or `add((env_ids, step))`.

    Args:
        target: the object.
        rank: rank of the Actor. Claiming a rank again returns the next incarnation.
    """

    def __init__(self, target: Any, rank: int | None) -> None:
        self._target, self._rank, self._is_open = target, rank, True
        self._was_ready = False
        # `_takes_pair` is False for a node, because the signature of its `add` is unknown until the first call.
        self._takes_pair = count_positional(target.add) == 1
        with _CLAIMING:
            if id(target) not in _claims:
                _claims[id(target)] = _Claims(target)
            self._claims = claims = _claims[id(target)]
            if (rank is None and claims.open) or (rank == 0 and None in claims.open):
                raise UsageError(
                    f"Another Actor in this process adds to the same {type(target).__name__}, which has no "
                    "claim_rank() to assign ranks. Both Actors would be rank 0, use the same seeds and collect the "
                    "same experience. Give each Actor its own rank: Actor(..., rank=0), Actor(..., rank=1). Or call "
                    "close() of the other Actor first."
                )
            claims.open.append(rank)
            self.incarnation = claims.incarnations[rank or 0]
            claims.incarnations[rank or 0] += 1

    def release(self) -> None:
        """Release the rank. The next Actor gets the same incarnation if `open_segment` was never called."""
        with _CLAIMING:
            if self._is_open:
                self._is_open = False
                self._claims.open.remove(self._rank)
                if not self._was_ready and self._claims.incarnations[self._rank or 0] == self.incarnation + 1:
                    self._claims.incarnations[self._rank or 0] -= 1

    def open_segment(self, rank: int, num_envs: int) -> None:
        """Mark the Actor as ready. The wrapped object has no segments."""
        self._was_ready = True

    def add(self, env_ids: np.ndarray, step: Step) -> None:
        """See `ReplayWriter`."""
        if not self._takes_pair:
            try:
                self._target.add(env_ids, step)
                return
            except RemoteError as error:  # the signature of a node's method is unknown here
                if _ONE_ARGUMENT not in str(error):
                    raise
                self._takes_pair = True
        self._target.add((env_ids, step))
