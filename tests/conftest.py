"""Pytest hooks for all tests: signals, garbage collection and memory."""

from __future__ import annotations

import gc
import os
import pathlib
import signal
import sys
from collections.abc import Iterator

import pytest

# A shell makes its jobs in the background ignore SIGINT, and so do their children: tests that send SIGINT would hang.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Make garbage collections rarer, and let them skip imported modules. This saves a tenth of the processor time.

    After each garbage collection, JAX runs an additional collection.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000)
        gc.enable()


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Ignore test_openapi.py if no system tests run, because schemathesis takes seconds to generate tests."""
    return True if collection_path.name == "test_openapi.py" and "not system" in config.option.markexpr else None


# maximum bytes of memory with compiled functions; above it, they are cleared, because test processes share the machine
_MUCH = 1.5e9


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Clear compiled functions after a test file if the process uses much memory."""
    try:
        return (yield)
    finally:
        jax = sys.modules.get("jax")
        if jax is not None and (nextitem is None or nextitem.path != item.path) and _memory() > _MUCH:
            jax.clear_caches()
            gc.collect()


def _memory() -> int:
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
