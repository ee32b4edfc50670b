"""Tests that `import rlframe` is fast, and that large libraries are imported only when they are needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENGINES = ("tensorflow", "launchpad", "reverb", "courier", "ray", "fastapi", "httpx", "tokenizers")
ENGINES += ("wandb", "trackio", "optuna")
PUBLIC = (
    "rlframe.actors rlframe.agents rlframe.envs rlframe.inferencers rlframe.learners rlframe.metrics "
    "rlframe.language.decoding rlframe.language.model rlframe.language rlframe.replay rlframe.trajectories"
)


def modules_after(statement: str) -> tuple[set[str], float]:
    """Run `statement` in a new process. Return the names of the imported top-level modules and the processor time."""
    program = (
        f"import time; start = time.process_time(); {statement}; seconds = time.process_time() - start\n"
        "import sys; print(seconds, *{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    seconds, *names = done.stdout.split()
    return set(names), float(seconds)


def test_import_rlframe_is_fast_and_imports_no_engine():
    loaded, seconds = modules_after("import rlframe")
    assert seconds < 2.0
    assert loaded.isdisjoint({*ENGINES, "jax", "numpy", "matplotlib", "rich"})


def test_public_packages_import_no_engine_or_environment_library():
    loaded, _ = modules_after(f"import {', '.join(PUBLIC.split())}")
    assert loaded.isdisjoint({*ENGINES, "envpool", "gymnasium", "dm_control", "matplotlib", "tensorboardX", "rich"})


def test_every_public_name_can_be_imported():
    import rlframe

    for name in rlframe.__all__:
        assert getattr(rlframe, name) is not None
    with pytest.raises(AttributeError, match="Lerner"):
        rlframe.Lerner  # noqa: B018
