"""Retries: pauses that grow from one attempt to the next, until a deadline."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator

_random = random.SystemRandom()  # differs between processes, even if all seed `random` alike


def backoff(
    first: float, longest: float, deadline: float = math.inf, *, since: float | None = None, jitter: float = 0.0
) -> Iterator[float]:
    """Yield the seconds to pause after each failed attempt. End when the deadline has passed: give up then.

    Each pause is twice as long as the one before it. The last one ends at the deadline.

    Args:
        first: seconds of the first pause.
        longest: seconds of a pause at most.
        deadline: seconds for all attempts and pauses.
        since: when the deadline began, by `time.monotonic`; None: at the first pause that is asked for.
        jitter: share of each pause, 0 to 1, that is random. It keeps callers that failed together from trying again
            together.
    """
    end, pause = (time.monotonic() if since is None else since) + deadline, first
    while (left := end - time.monotonic()) > 0:
        yield min(_random.uniform(1.0 - jitter, 1.0) * pause, left)
        pause = min(2.0 * pause, longest)
