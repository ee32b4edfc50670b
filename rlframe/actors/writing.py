"""The one adapter to what an Actor adds its steps to."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from rlframe import handles
from rlframe.errors import NoMethodError, RemoteError, UsageError
from rlframe.types import Step

_ONE_ARGUMENT = "add() takes 2 positional arguments but 3 were given"  # Python's words, `self` counted


def claim_rank(replay_buffer: Any, rank: int | None) -> tuple[Any, int, int]:
    """(what to add to, rank, incarnation) for an Actor.

    Args:
        replay_buffer: a writer of a replay, a handle to one, or anything with `add` alone: then the Actor's rank is its
            own, 0 unless it was told another.
        rank: that is asked for; None: any.

    Raises:
        UsageError: it has no `add`.
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
    return OnlyAdds(replay_buffer), rank or 0, 0


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
