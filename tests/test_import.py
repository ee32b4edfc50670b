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


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("rlframe.cli.status, rlframe.programs.run_dir.status", {"jax", "matplotlib", "orbax", "haiku"}),
        ("rlframe.cli.listings", {"jax", "matplotlib", "orbax", "haiku"}),
        ("rlframe.cli.train", {"matplotlib", "orbax", "tensorboardX"}),
    ],
)
def test_command_imports_no_library_that_it_does_not_need(modules, absent):
    loaded, _ = modules_after(f"import {modules}")
    assert loaded.isdisjoint(absent)


def test_train_command_imports_neither_the_coordinator_nor_other_agents_to_read_its_options():
    program = (
        "import sys; from rlframe.cli.train_options import read_arguments; read_arguments(['--env', 'CartPole-v1']); "
        "print(*(name for name in sys.modules if name.startswith('rlframe.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    loaded = set(done.stdout.split())
    assert "rlframe.agents.ppo" in loaded
    unneeded = ("coordinator.coordinator", "device.rounds", "agents.sac", "agents.grpo", "replay.shared_memory.buffer")
    assert loaded.isdisjoint(f"rlframe.{name}" for name in unneeded)


def test_every_public_name_can_be_imported():
    import rlframe

    for name in rlframe.__all__:
        assert getattr(rlframe, name) is not None
    with pytest.raises(AttributeError, match="Lerner"):
        rlframe.Lerner  # noqa: B018
