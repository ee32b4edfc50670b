"""What was counted in this epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Batches and sequences are counted when first served; the rest are groups, `redelivered` batches."""

    batches: int = 0
    sequences: int = 0
    redelivered: int = 0
    discarded: int = 0
    refused: int = 0
    duplicates: int = 0
    aged: int = 0  # groups served whose staleness was known
    staleness_sum: int = 0
    staleness_largest: int = 0

    def serve(self, sequences: int, staleness: Iterable[int | None]) -> None:
        self.batches += 1
        self.sequences += sequences
        for age in staleness:
            if age is not None:
                self.aged += 1
                self.staleness_sum += age
                self.staleness_largest = max(self.staleness_largest, age)
