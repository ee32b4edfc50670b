"""docs/api.md: every line of code in it, run from top to bottom in an empty folder."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "api.md"


@pytest.mark.system
def test_the_page_runs_and_learns(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 8
    (tmp_path / "page.py").write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280.0)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert float(lines[0].split()[0]) > 150.0 and lines[0].endswith("see runs/first/learning_curve.png")
    assert float(lines[2].split()[0]) > 150.0  # evaluated, after more steps
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "runs/first/learning_curve.png").exists()
