"""Fixtures of the tests of agents."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from tests.extras import import_or_skip


@pytest.fixture
def rlax(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The package rlax. It is imported without TensorFlow, which it does not need and which takes seconds."""
    if "rlax" not in sys.modules and "tensorflow" not in sys.modules:
        monkeypatch.setitem(sys.modules, "tensorflow", None)
    return import_or_skip("rlax", "pip install 'rlframe[test]'")
