"""`EnvLog` sums the numbers that environments log in addition to their rewards."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlframe.metrics.rows import Sums

_log = logging.getLogger(__name__)

MAX_NAMES = 64
MAX_BYTES = 56  # maximum length of a name in UTF-8


class EnvLog:
    """Sums the numbers that the environments of one group log. Each name has its own sum.

    The arrays can be in shared memory. Only the process that steps the environments may write. Any process may read.

    Args:
      names: array [MAX_NAMES] of empty bytes. None means a new array.
      values: array [MAX_NAMES, 2] of zeros, float64, for the sum and the count of each name. None means a new array.
    """

    def __init__(self, names: np.ndarray | None = None, values: np.ndarray | None = None):
        shapes = log_shapes()
        self._names = np.zeros(*shapes[0]) if names is None else names
        self._values = np.zeros(*shapes[1]) if values is None else values
        self._rows: dict[str, int] = {}  # name -> row
        self._refused: set[str] = set()  # names for which a warning was logged, once for each name
        self._lock = threading.Lock()  # necessary if several threads step the group

    def add(self, env_id: int, logged: Any) -> None:
        """Add the numbers that environment `env_id` logged. If a value is not a number, warn once for its name."""
        if not isinstance(logged, Mapping):
            self._warn_once("", f"Environment {env_id} logged {logged!r}: expected a dict of names and numbers.")
            return
        with self._lock:
            for name, value in logged.items():
                number = _as_number(value)
                if number is None:
                    self._warn_once(
                        name, f"Environment {env_id} logged {name!r} as {value!r}: expected a finite number."
                    )
                    continue
                row = self._rows.get(name)
                if row is None:
                    row = self._new_row(env_id, name)
                if row is not None:
                    self._values[row] += (number, 1.0)

    def sums(self) -> Sums:
        """Return a dict of name -> [sum, count] since the creation of this log. Any thread or process may call this."""
        values = self._values.tolist()
        # Read the names last: a process writes a new name completely before it adds the first value of this name.
        rows = zip(self._names.tolist(), values, strict=True)
        return {name.decode(errors="ignore"): counted for name, counted in rows if counted[1]}

    def _new_row(self, env_id: int, name: Any) -> int | None:
        row = len(self._rows)
        encoded = name.encode() if isinstance(name, str) else b""
        if not 0 < len(encoded) <= MAX_BYTES:
            expected = f"a name of 1 to {MAX_BYTES} bytes"
        elif row == MAX_NAMES:
            expected = f"{MAX_NAMES} names at most"
        else:
            self._names[row] = encoded
            self._rows[name] = row
            return row
        self._warn_once(name, f"Environment {env_id} logged {name!r}: expected {expected}.")
        return None

    def _warn_once(self, name: Any, sentence: str) -> None:
        if str(name) not in self._refused and len(self._refused) < MAX_NAMES:
            self._refused.add(str(name))
            _log.warning("%s The metrics do not include it.", sentence)


def log_shapes() -> list[tuple[tuple[int, ...], Any]]:
    """Return (shape, dtype) of the arrays of an `EnvLog`."""
    return [((MAX_NAMES,), np.dtype(f"S{MAX_BYTES}")), ((MAX_NAMES, 2), np.dtype(np.float64))]


def _as_number(value: Any) -> float | None:
    try:
        number = float(value) if np.ndim(value) == 0 and not isinstance(value, (str, bytes)) else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
