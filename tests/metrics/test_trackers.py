"""Tests of W&B in offline mode, of Trackio on the local disk, and of the errors if W&B or Trackio is not installed."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys

import numpy as np
import pytest

from rlframe.errors import UsageError
from rlframe.metrics import TrackioLogger, WandbLogger
from tests.extras import needs
from tests.waiting import wait_until


@pytest.mark.parametrize(("logger", "module"), [(WandbLogger, "wandb"), (TrackioLogger, "trackio")])
def test_error_for_a_missing_tracker_names_the_extra(tmp_path, monkeypatch, logger, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"^{logger.__name__} needs the extra '{module}': pip install "):
        logger(tmp_path)


@pytest.mark.system
def test_wandb_offline_writes_rows_to_the_run_directory(tmp_path, monkeypatch):
    needs("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = WandbLogger(tmp_path / "run", config={"seed": 7})
    for step in (10, 20):
        logger.write(step, {"episode_return": float(step), "returns": np.arange(3.0), "note": "x"})
    logger.close()
    logger.close()
    (run,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    run_id = (tmp_path / "run" / "wandb_run_id").read_text()
    (stored,) = run.glob(f"run-{run_id}.wandb")
    wait_until(lambda: b"seed" in stored.read_bytes())  # wandb's process writes the file with a delay
    content = stored.read_bytes()
    assert b"episode_return" in content and b"histogram" in content


@pytest.mark.system
def test_resumed_run_keeps_its_wandb_id(tmp_path):
    needs("wandb")
    first = WandbLogger(tmp_path, mode="disabled")
    run_id = (tmp_path / "wandb_run_id").read_text()
    first.close()
    WandbLogger(tmp_path, mode="disabled").close()
    assert (tmp_path / "wandb_run_id").read_text() == run_id


@pytest.mark.system
def test_trackio_stores_rows_and_prints_nothing_on_stdout(tmp_path):
    needs("trackio")
    # Use another process, because Trackio reads TRACKIO_DIR when it is imported.
    program = (
        "import sys\n"
        "from rlframe.metrics import TrackioLogger\n"
        "for steps in ((1, 2), (3,)):\n"  # step 3 is written by a resumed run
        f"    logger = TrackioLogger({str(tmp_path / 'run7')!r}, project='tests')\n"
        "    for step in steps:\n"
        "        logger.write(step, {'loss': 0.5 * step, 'note': 'x'})\n"
        "    logger.close()\n"
    )
    environment = {"TRACKIO_DIR": str(tmp_path / "store"), "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    with contextlib.closing(sqlite3.connect(tmp_path / "store" / "tests.db")) as store:
        rows = store.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(name, step, json.loads(metrics)) for name, step, metrics in rows] == [
        ("run7", 1, {"loss": 0.5}),
        ("run7", 2, {"loss": 1.0}),
        ("run7", 3, {"loss": 1.5}),
    ]
