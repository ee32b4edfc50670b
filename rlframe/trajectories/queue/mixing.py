"""Shares by weight: who is served next where a registration says `mix="weight"`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class WeightedShares:
    """Start-time fair queueing (Goyal, Vin and Cheng, 1996): those who have something queued are served in proportion
    to their weights. Who has nothing takes no part, and has no claim to it later.

    Time is virtual here: sequences served, divided by the weight of whom they came from.

    Args:
        weight_of: of an environment, more than 0; its id is None where senders did not say who they are.
    """

    def __init__(self, weight_of: Callable[[int | None], float]) -> None:
        self._weight_of = weight_of
        self._now = 0.0
        self._served_until: dict[int | None, float] = {}

    def copy(self) -> WeightedShares:
        """The same, which goes on by itself."""
        copied = WeightedShares(self._weight_of)
        copied.become(self)
        return copied

    def become(self, other: WeightedShares) -> None:
        """Take over where another copy stands."""
        self._now, self._served_until = other._now, dict(other._served_until)

    def turn(self, env_id: int | None) -> float:
        """When it is an environment's turn: the lowest is next."""
        return max(self._now, self._served_until.get(env_id, 0.0))

    def serve(self, env_id: int | None, sequences: int) -> None:
        """Count what is served."""
        self._served_until[env_id] = self.turn(env_id) + sequences / self._weight_of(env_id)

    def end_batch(self, queued: Iterable[int | None]) -> None:
        """A batch is formed: from here on nobody is owed what was served before `queued`, who still have something, had
        their turns."""
        self._now = max(self._now, min(map(self.turn, queued), default=max(self._served_until.values(), default=0.0)))

    def to_state(self) -> list[Any]:
        return [self._now, list(self._served_until.items())]

    def set_state(self, state: list[Any]) -> None:
        self._now, self._served_until = state[0], dict(state[1])
