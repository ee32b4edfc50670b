"""`make test` runs two tests at a time, but one after another those that start programs or look at all processes."""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile

import pytest

HERE = pathlib.Path(__file__).parent
ALONE = (
    *("programs", "actors/test_light_env.py", "actors/test_on_policy.py", "replay/test_shared_memory.py"),
    *("test_cli_process.py", "test_examples.py", "trajectories", "coordinator/operators"),
)

# What is compiled is compiled once for all processes of the tests. (One that is killed while it writes leaves an entry
# that JAX warns of, and compiles again.)
CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}


def pytest_configure(config: pytest.Config) -> None:
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # nor in that of the workers, which this process starts
        directory = tempfile.mkdtemp(prefix="rlframe-tests-")
        os.environ.update(CACHE, JAX_COMPILATION_CACHE_DIR=directory)
        config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.path.is_relative_to(HERE / part) for part in ALONE):
            item.add_marker(pytest.mark.xdist_group("programs"))
