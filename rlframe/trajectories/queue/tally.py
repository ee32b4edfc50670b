"""What was counted in this epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """What is served is counted the first time. `redelivered` are batches; where nothing else is said, groups."""

    added: int = 0
    added_sequences: int = 0
    added_tokens: int = 0
    batches: int = 0
    groups: int = 0  # served
    sequences: int = 0  # served
    redelivered: int = 0
    discarded: int = 0
    refused: int = 0
    duplicates: int = 0
    aged: int = 0  # groups served whose staleness was known
    staleness_sum: float = 0.0  # which, unlike an integer, a snapshot can carry whatever it is
    staleness_largest: int = 0

    def add(self, sequences: int, tokens: int) -> None:
        self.added += 1
        self.added_sequences += sequences
        self.added_tokens += tokens

    def serve(self, sequences: int, staleness: Iterable[int | None]) -> None:
        self.batches += 1
        self.sequences += sequences
        for age in staleness:
            self.groups += 1
            if age is not None:
                self.aged += 1
                self.staleness_sum += age
                self.staleness_largest = max(self.staleness_largest, age)
