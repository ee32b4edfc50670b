"""How all tests are collected."""

from __future__ import annotations

import gc
import os
import pathlib
import sys
from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Looks for garbage less often, and not in what is imported here, which stays: a tenth of the processor time.

    JAX looks for its own after each of Python's collections.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000)
        gc.enable()


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Leaves out the files for which schemathesis takes seconds to make tests, where their marker is left out."""
    return True if collection_path.name == "test_openapi.py" and "not system" in config.option.markexpr else None


_MUCH = 1.5e9  # bytes; each compiled function takes some, and three of these processes share the machine


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Forgets compiled functions between two files once they take much memory."""
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
