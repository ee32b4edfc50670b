"""`ActorReplay` is the replay buffer of an actor: the actor claims its rank from it, and adds steps to it.

`AddOnlyWriter` adapts buffers that only have `add`.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from rlframe import handles
from rlframe.errors import NoMethodError, RemoteError, UsageError
from rlframe.inferencers.base import count_positional
from rlframe.replay import BaseReplayBuffer, as_replay_buffer
from rlframe.types import ReplaySpec, Step

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
