"""The answers to the latest keyed requests, so that a retry after a lost reply is not a second group."""

from __future__ import annotations

from typing import Any, NamedTuple, Union

MAX_KEYS = 100_000
MAX_AGE = 3600.0  # seconds

_Kept = dict[str, Union[int, None]]  # sequences left in the buffer, None where the group was received


class Added(NamedTuple):
    """`status` is "received", "buffered" (not of its environment's group size) or "refused" (nothing was kept).

    A repeated idempotency key gets the first answer again, with `duplicate` set and without the id.
    """

    status: str
    group_id: int | None = None
    buffer_size: int | None = None  # sequences left in the buffer, where buffered
    duplicate: bool = False
    reason: str | None = None  # a sentence, where refused
    too_large: bool = False  # refused because no batch can hold it: no retry will do better
    too_old: bool = False  # refused, and it gets no younger


class KnownKeys:
    """key -> answer, for the last `MAX_KEYS` keys of the last `MAX_AGE` seconds, and for some before these.

    They are forgotten by the generation: all that are older than the younger one, which is as long as that.
    """

    def __init__(self) -> None:
        self._younger: _Kept = {}
        self._older: _Kept = {}
        self._since = 0.0  # when the younger one began, in seconds

    def get(self, key: str, now: float) -> Added | None:
        age = now - self._since
        if age >= MAX_AGE:
            self._turn(now, self._younger if age < 2 * MAX_AGE else {})
        for kept in (self._younger, self._older):
            if key in kept:
                left = kept[key]
                return Added("received" if left is None else "buffered", buffer_size=left, duplicate=True)
        return None

    def put(self, key: str, answer: Added, now: float) -> None:
        if len(self._younger) >= MAX_KEYS:
            self._turn(now, self._younger)
        self._younger[key] = answer.buffer_size

    def to_state(self) -> list[Any]:
        """Quick, however many there are."""
        generations = (self._older, self._younger)
        return [[[list(kept), list(kept.values())] for kept in generations], self._since]

    @classmethod
    def from_state(cls, state: list[Any]) -> KnownKeys:
        known = cls()
        known._older, known._younger = (dict(zip(keys, values)) for keys, values in state[0])
        known._since = state[1]
        return known

    def _turn(self, now: float, older: _Kept) -> None:
        """Begin another generation."""
        self._older, self._younger, self._since = older, {}, now
