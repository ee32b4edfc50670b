"""The answers to the latest keyed requests, so that a retry after a lost reply is not a second group."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from rlframe.trajectories.answers import Added

MAX_KEYS = 100_000
MAX_AGE = 3600.0  # seconds


class Answers:
    """key -> answer, for the last `MAX_KEYS` keys of the last `MAX_AGE` seconds."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, tuple[float, Added]] = OrderedDict()

    def get(self, key: str, now: float) -> Added | None:
        if key not in self._answers:
            return None
        at, answer = self._answers[key]
        return answer if now - at < MAX_AGE else None

    def put(self, key: str, answer: Added, now: float) -> None:
        self._answers.pop(key, None)
        self._answers[key] = (now, answer)
        while len(self._answers) > MAX_KEYS or now - next(iter(self._answers.values()))[0] >= MAX_AGE:
            self._answers.popitem(last=False)

    def to_state(self) -> list[Any]:
        """Quick, however many there are: the answers themselves, which do not change."""
        return [list(self._answers), list(self._answers.values())]

    @classmethod
    def from_state(cls, state: list[Any]) -> Answers:
        answers = cls()
        keys, values = state
        answers._answers = OrderedDict((key, (at, Added(*answer))) for key, (at, answer) in zip(keys, values))
        return answers
