"""Run the code on the tutorial pages in docs/ from top to bottom in an empty folder. Check that the agents learn."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
RLFRAME = [sys.executable, "-m", "rlframe"]


def follow(page: str, folder: pathlib.Path) -> str:
    """Write the files that a page shows, run its commands, and run its other Python code as one script.

    Return the output of the script.
    """
    script, out = "", ""
    for kind, block in re.findall(
        r"^```(python|console)\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE
    ):
        if named := re.match(r"# (\w+\.py)\n", block):
            (folder / named[1]).write_text(block)
        elif kind == "python":
            script += block
        else:
            for line in re.findall(r"^\$ rlframe (.*)", block, re.MULTILINE):
                out += run([*RLFRAME, *line.split()], folder)
    return out + (run([sys.executable, "-c", script], folder) if script else "")


def run(command: list[str], folder: pathlib.Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(DOCS.parent)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280.0)
    assert done.returncode == 0 and "Traceback" not in done.stderr, f"{command}\n{done.stderr}"
    return done.stdout


def evaluated(run_dir: pathlib.Path) -> float:
    """Return the mean episode return in the last evaluation of a run."""
    assert (run_dir / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["return_mean"] for row in rows if "return_mean" in row][-1]


@pytest.mark.system
def test_code_of_the_python_page_trains_and_acts(tmp_path):
    lines = follow("api.md", tmp_path).splitlines()
    assert float(lines[0].split()[0]) > 150.0 and lines[0].endswith(f"see {tmp_path}/runs/first/learning_curve.png")
    assert evaluated(tmp_path / "runs" / "first") > 150.0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.system
def test_agent_learns_the_environment_of_the_custom_environment_page(tmp_path):
    follow("own-environment.md", tmp_path)
    assert evaluated(tmp_path / "runs" / "catch") > 0.8  # Random actions would have a mean return of 1 / 7.
    rows = [json.loads(line) for line in (tmp_path / "runs" / "catch" / "metrics.jsonl").read_text().splitlines()]
    assert any("env/caught" in row for row in rows)
    assert (tmp_path / "curves.png").exists()


@pytest.mark.system
def test_network_of_the_custom_network_page_learns(tmp_path):
    follow("own-network.md", tmp_path)
    assert evaluated(tmp_path / "runs" / "residual") > 150.0
    assert (tmp_path / "curves.png").exists()


@pytest.mark.system
@pytest.mark.parametrize("page", ["fine-tune.md", "load-and-act.md", "callbacks.md"])
def test_code_of_the_pages_about_policies_runs(tmp_path, page):
    follow(f"howto/{page}", tmp_path)
