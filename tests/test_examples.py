"""The example pages that launch programs, as a reader would run them."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import psutil
import pytest

pytest.importorskip("launchpad", reason="dm-launchpad is not installed: pip install rlframe[launchpad]")

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize(
    "page", ["heavy_env", *(pytest.param(page, marks=pytest.mark.system) for page in ("light_env", "distributed"))]
)
def test_a_topology_learns_under_plain_launchpad_and_stops_cleanly(page: str):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    run = subprocess.run(
        [sys.executable, f"examples/{page}.py"], cwd=ROOT, capture_output=True, text=True, timeout=240.0
    )
    assert run.returncode == 0, run.stdout + run.stderr
    returns = [float(value) for value in re.findall(r"return +([\d.]+) after", run.stdout + run.stderr)]
    assert max(returns) >= 195.0, run.stdout + run.stderr
    assert "Killing" not in run.stdout + run.stderr  # which is how Launchpad ends nodes that do not stop
    assert not {child.pid for child in psutil.Process().children(recursive=True)} - before


@pytest.mark.system
def test_a_coordinator_made_by_hand_learns_and_leaves_no_process():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    run = subprocess.run(
        [sys.executable, "examples/elastic.py"], cwd=ROOT, capture_output=True, text=True, timeout=240.0
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "RUNNING → DRAINING" in run.stdout
    returns = re.findall(r"^return ([\d.]+)$", run.stdout, re.MULTILINE)
    assert float(returns[0]) >= 195.0, run.stdout + run.stderr
    assert not {child.pid for child in psutil.Process().children(recursive=True)} - before


@pytest.mark.system
def test_a_coordinator_made_by_hand_says_why_its_job_failed(tmp_path: pathlib.Path):
    code = (
        "import dataclasses, sys; sys.path.insert(0, 'examples'); import elastic; "
        "elastic.config = dataclasses.replace(elastic.config, learning_rate=1e38); "
        f"sys.exit(elastic.main({str(tmp_path)!r}))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240.0)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "The job failed: " in run.stderr and "NonFiniteLossError" in run.stderr and "TypeError" not in run.stderr
