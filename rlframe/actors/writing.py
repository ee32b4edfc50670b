"""The one adapter to what an Actor adds its steps to."""

from __future__ import annotations

import collections
import inspect
import weakref
from typing import Any

import numpy as np

from rlframe import handles
from rlframe.errors import NoMethodError, RemoteError, UsageError
from rlframe.types import Step

_ONE_ARGUMENT = "add() takes 2 positional arguments but 3 were given"  # Python's words, `self` counted


def claim_rank(replay_buffer: Any, rank: int | None) -> tuple[Any, int, int]:
    """(what to add to, rank, incarnation) for an Actor.

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
    return (OnlyAdds(replay_buffer), *_claim_here(replay_buffer, rank))


# By id of each replay buffer in this process that has only `add`: a weak reference, and the claims of each rank.
_claims: dict[int, tuple[Any, collections.Counter[int | None]]] = {}


def _claim_here(target: Any, rank: int | None) -> tuple[int, int]:
    """(rank, incarnation) for an Actor of this process. A rank that is claimed again gets the next incarnation."""
    key = id(target)
    if key not in _claims:
        try:
            reference: Any = weakref.ref(target, lambda _: _claims.pop(key, None))
        except TypeError:  # it cannot be referred to weakly: keep it, so that no other object gets its id
            reference = target
        _claims[key] = reference, collections.Counter()
    claims = _claims[key][1]
    if (rank is None and claims) or (rank == 0 and None in claims):
        raise UsageError(
            f"Another Actor in this process adds to the same {type(target).__name__}, which has no claim_rank() to "
            "hand out ranks. Both would be rank 0, with the same seeds, and collect the same experience. Give each "
            "Actor its own rank: Actor(..., rank=0), Actor(..., rank=1)."
        )
    claims[rank] += 1
    return rank or 0, claims[rank] - 1


class OnlyAdds:
    """A writer of an object that has only `add(env_ids, step)`, or `add(data)` for `data = (env_ids, step)`."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._takes_pair = False
        if not isinstance(target, handles.Remote):
            parameters = inspect.signature(target.add).parameters.values()
            kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            many = any(one.kind is one.VAR_POSITIONAL for one in parameters)
            self._takes_pair = not many and sum(one.kind in kinds for one in parameters) == 1

    def open_segment(self, rank: int, num_envs: int) -> None:
        """See `ReplayWriter`; nobody is told."""

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
