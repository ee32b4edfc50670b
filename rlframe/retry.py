"""Try again: after exponential pauses until a deadline, or with fewer environments."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from rlframe.errors import EnvError, UsageError

_random = random.SystemRandom()  # differs between processes, even if each process calls `random.seed(0)`


def backoff(
    first: float, longest: float, deadline: float = math.inf, *, since: float | None = None, jitter: float = 0.0
) -> Iterator[float]:
    """Yield the number of seconds to pause after each failed attempt. Yield nothing after the deadline.

    Each pause is twice as long as the previous one, up to `longest`. The last pause ends at the deadline.

    Args:
        first: seconds of the first pause.
        longest: maximum seconds of a pause.
        deadline: maximum total seconds of all attempts and pauses.
        since: `time.monotonic()` value from which the deadline counts. None means the time of the first pause.
        jitter: from 0 to 1, the fraction of each pause that is random, so that callers that failed together do not
            retry together.
    """
    end, pause = (time.monotonic() if since is None else since) + deadline, first
    while (left := end - time.monotonic()) > 0:
        yield min(_random.uniform(1.0 - jitter, 1.0) * pause, left)
        pause = min(2.0 * pause, longest)


def make_largest(make: Callable[[int], Any], count: int) -> tuple[Any, Exception | None]:
    """Return (`make(n)`, error) for the largest n up to `count` at which `make` does not fail.

    `error` is the error of `make(count)`, or None. A binary search finds n. Results of `make` must have `close()`.

    Raises:
        EnvError, UsageError: the error of `make(count)`, if `make(1)` fails too.
    """
    try:
        return make(count), None
    except (EnvError, UsageError) as error:
        problem = error
    works, fails = 0, count
    while fails - works > 1:
        middle = (works + fails) // 2
        try:
            make(middle).close()
        except (EnvError, UsageError):
            fails = middle
        else:
            works = middle
    if not works:
        raise problem
    return make(works), problem
