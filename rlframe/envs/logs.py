"""Numbers that environments log beside their rewards, summed up by name."""

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
MAX_BYTES = 56  # of a name


class EnvLog:
    """Sums up what the environments of one group log.

    It may lie in memory that processes share: the one that steps the environments writes, and any reads, at any time.

    Args:
      names: [MAX_NAMES] bytes, zeros; memory of its own, if None.
      values: [MAX_NAMES, 2] float64, zeros: the sum and the count of each.
    """

    def __init__(self, names: np.ndarray | None = None, values: np.ndarray | None = None):
        shapes = log_shapes()
        self._names = np.zeros(*shapes[0]) if names is None else names
        self._values = np.zeros(*shapes[1]) if values is None else values
        self._rows: dict[str, int] = {}  # of the names that were added here
        self._refused: set[str] = set()  # so that each is told once
        self._lock = threading.Lock()  # threads may share a group

    def add(self, env_id: int, logged: Any) -> None:
        """Counts the numbers that environment `env_id` logged, by name; warns, once for each name, of what is none."""
        if not isinstance(logged, Mapping):
            self._refuse("", f"Environment {env_id} logged {logged!r}: expected a dict of names and numbers.")
            return
        with self._lock:
            for name, value in logged.items():
                number = _as_number(value)
                if number is None:
                    self._refuse(name, f"Environment {env_id} logged {name!r} as {value!r}: expected a finite number.")
                    continue
                row = self._rows.get(name)
                if row is None:
                    row = self._new_row(env_id, name)
                if row is not None:
                    self._values[row] += (number, 1.0)

    def sums(self) -> Sums:
        """name -> [sum, count], since it was made. Any thread, or process, may ask."""
        values = self._values.tolist()
        # Names after values: one that another process may just be writing is whole once something is counted for it.
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
        self._refuse(name, f"Environment {env_id} logged {name!r}: expected {expected}.")
        return None

    def _refuse(self, name: Any, sentence: str) -> None:
        if str(name) not in self._refused and len(self._refused) < MAX_NAMES:
            self._refused.add(str(name))
            _log.warning("%s It is left out of the metrics.", sentence)


def log_shapes() -> list[tuple[tuple[int, ...], Any]]:
    """(shape, dtype) of the arrays that an EnvLog is made of."""
    return [((MAX_NAMES,), np.dtype(f"S{MAX_BYTES}")), ((MAX_NAMES, 2), np.dtype(np.float64))]


def _as_number(value: Any) -> float | None:
    try:
        number = float(value) if np.ndim(value) == 0 and not isinstance(value, (str, bytes)) else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
