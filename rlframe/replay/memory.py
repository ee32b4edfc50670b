"""Whether a buffer fits into the memory that this process may still take."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import psutil

from rlframe.errors import UsageError

_CGROUPS = pathlib.Path("/sys/fs/cgroup")
_OWN_CGROUPS = pathlib.Path("/proc/self/cgroup")
# (limit, usage, what of it is cache that the kernel would give up) of cgroups v2 and v1
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def check_memory(needed: int, capacity: int, what: str) -> None:
    """Raises `UsageError` where `needed` bytes for `capacity` steps exceed what is left.

    Pages are touched only as the buffer fills, so nothing else would stop it before the machine is out of memory.
    """
    available = available_memory()
    if needed > available:
        fits = int(capacity * (available / needed) * 0.9)
        raise UsageError(
            f"The replay buffer needs {_gigabytes(needed)} for {capacity} steps ({what}), and "
            f"{_gigabytes(available)} of memory is available. A capacity of {fits} steps would fit."
        )


def available_memory() -> int:
    """Bytes that this process can still take without swapping: of the machine, and of its container's limit."""
    containers = [left for directory in _cgroups() if (left := _left(directory)) is not None]
    return max(0, min([psutil.virtual_memory().available, *containers]))


def _cgroups() -> Iterator[pathlib.Path]:
    """The directories of this process's memory cgroups, from its own up to the root that it can see."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:  # `0::/path` in version 2, `4:memory:/path` in version 1
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS / "memory" if controllers else _CGROUPS
        own = root / path.lstrip("/")
        yield from (directory for directory in (own, *own.parents) if directory.is_relative_to(root))


def _left(cgroup: pathlib.Path) -> int | None:
    for limit_file, usage_file, cache in _FILES:
        try:
            limit, usage = (cgroup / limit_file).read_text().strip(), int((cgroup / usage_file).read_text())
            statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit == "max":
            return None
        return int(limit) - usage + int(statistics.get(cache, 0))
    return None


def _gigabytes(n: int) -> str:
    return f"{n / 1e9:.2f} GB ({n} bytes)"
