"""Fixtures of the tests of the control API: a coordinator that records calls, and its server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.control.scripted_coordinator import ScriptedCoordinator

if TYPE_CHECKING:
    from rlframe.http.serving import ServerThread


@pytest.fixture
def coordinator() -> ScriptedCoordinator:
    return ScriptedCoordinator()


@pytest.fixture
def server(coordinator: ScriptedCoordinator) -> Iterator[ServerThread]:
    from rlframe.control.app import serve_control  # needs an extra; the test files check that it is installed

    with serve_control(coordinator, port=0) as server:
        yield server
