"""Make as many environments as possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlframe.errors import EnvError, UsageError


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
