"""How all tests are collected."""

from __future__ import annotations

import gc
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
