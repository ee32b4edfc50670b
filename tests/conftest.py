"""`make test` runs two tests at a time, but one after another those that start programs or look at all processes."""

from __future__ import annotations

import pathlib

import pytest

HERE = pathlib.Path(__file__).parent
ALONE = (
    *("programs", "actors/test_light_env.py", "actors/test_on_policy.py", "replay/test_shared_memory.py"),
    *("test_cli_process.py", "test_examples.py", "trajectories", "coordinator/operators"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.path.is_relative_to(HERE / part) for part in ALONE):
            item.add_marker(pytest.mark.xdist_group("programs"))
