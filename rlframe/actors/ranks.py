"""Claim the rank of an Actor from its replay buffer. Adapt a buffer that has only `add`."""

from __future__ import annotations

import collections
import threading
import weakref
from typing import Any

import numpy as np

from rlframe import handles
from rlframe.errors import NoMethodError, RemoteError, UsageError
from rlframe.inferencers.base import count_positional
from rlframe.types import Step

_ONE_ARGUMENT = "add() takes 2 positional arguments but 3 were given"  # Python's words, `self` counted


def claim_rank(replay_buffer: Any, rank: int | None) -> tuple[Any, int, int]:
    """Return (writer, rank, incarnation) for an Actor.

    Args:
        replay_buffer: a writer of a replay, a handle to one, or anything with `add` alone, which hands out no ranks.
        rank: the rank to claim; None: any. With `add` alone, None means rank 0, for the only Actor of a process that is
            no node of a program.

    Raises:
        UsageError: it has no `add`, or it has `add` alone and other Actors may have the same rank.
    """
    if not isinstance(replay_buffer, handles.Remote) and not callable(getattr(replay_buffer, "add", None)):
        raise UsageError(
            f"A {type(replay_buffer).__name__} was given as the replay buffer of an Actor: it needs add(env_ids, step)."
        )
    if hasattr(replay_buffer, "claim_rank"):
        try:
            return (replay_buffer, *replay_buffer.claim_rank(rank=rank))
        except NoMethodError:
            pass
    if rank is None and (isinstance(replay_buffer, handles.Remote) or handles.program_stop() is not None):
        raise UsageError(
            "The replay buffer has add() but no claim_rank(), so it hands out no ranks. An Actor without a rank would "
            "be rank 0, like the Actors of other processes: all would have the same seeds and collect the same "
            "experience. Give each Actor its own rank: Actor(..., rank=0), Actor(..., rank=1)."
        )
    writer = AddOnlyWriter(replay_buffer, rank)
    return writer, rank or 0, writer.incarnation


class _Claims:
    """The ranks of the Actors in this process that add to one object."""

    def __init__(self, target: Any) -> None:
        key = id(target)
        try:
            self.target: Any = weakref.ref(target, lambda _: _claims.pop(key, None))
        except TypeError:  # it cannot be referred to weakly: keep it, so that no other object gets its id
            self.target = target
        self.open: list[int | None] = []  # of the Actors that are not closed, as they were given
        self.incarnations = collections.Counter[int]()  # the next one of each rank


_claims: dict[int, _Claims] = {}  # by id of the object
_CLAIMING = threading.Lock()


class AddOnlyWriter:
    """A `ReplayWriter` around an object that has only `add(env_ids, step)`, or `add((env_ids, step))`.

    Args:
        target: the object.
        rank: of the Actor that writes. A rank that is claimed again gets the next incarnation.
    """

    def __init__(self, target: Any, rank: int | None) -> None:
        self._target, self._rank, self._is_open = target, rank, True
        # Unknown for a node until the first call.
        self._takes_pair = not isinstance(target, handles.Remote) and count_positional(target.add) == 1
        with _CLAIMING:
            if id(target) not in _claims:
                _claims[id(target)] = _Claims(target)
            self._claims = claims = _claims[id(target)]
            if (rank is None and claims.open) or (rank == 0 and None in claims.open):
                raise UsageError(
                    f"Another Actor in this process adds to the same {type(target).__name__}, which has no "
                    "claim_rank() to hand out ranks. Both would be rank 0, with the same seeds, and collect the same "
                    "experience. Give each Actor its own rank: Actor(..., rank=0), Actor(..., rank=1). Or close the "
                    "other one first: close()."
                )
            claims.open.append(rank)
            self.incarnation = claims.incarnations[rank or 0]
            claims.incarnations[rank or 0] += 1

    def release(self, *, was_ready: bool) -> None:
        """Give the rank back. The next Actor gets the same incarnation if this one was never ready."""
        with _CLAIMING:
            if self._is_open:
                self._is_open = False
                self._claims.open.remove(self._rank)
                if not was_ready and self._claims.incarnations[self._rank or 0] == self.incarnation + 1:
                    self._claims.incarnations[self._rank or 0] -= 1

    def open_segment(self, rank: int, num_envs: int) -> None:
        """Do nothing: the object has no segments."""

    def add(self, env_ids: np.ndarray, step: Step) -> None:
        """See `ReplayWriter`."""
        if not self._takes_pair:
            try:
                self._target.add(env_ids, step)
                return
            except RemoteError as error:  # the signature of a node's method is not known here
                if _ONE_ARGUMENT not in str(error):
                    raise
                self._takes_pair = True
        self._target.add((env_ids, step))
