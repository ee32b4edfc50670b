"""Tests of JSONL and CSV files after a process was killed, a run was resumed, or the disk was full."""

from __future__ import annotations

import csv
import json
import os
import pathlib

import numpy as np
import pytest

from rlframe.errors import RlframeError
from rlframe.metrics import CSVLogger, JSONLLogger, read_jsonl
from rlframe.metrics.rows import append


def read_table(path: pathlib.Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_row_is_in_the_file_when_write_returns(tmp_path):
    logger = JSONLLogger(tmp_path / "metrics.jsonl")
    logger.write(8, {"loss": np.float32(0.5), "episodes": np.int64(3), "note": "warm", "solved": True})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 8, "loss": 0.5, "episodes": 3, "note": "warm", "solved": True,
    }  # fmt: skip


def test_nan_becomes_null_and_arrays_become_lists(tmp_path):
    logger = JSONLLogger(tmp_path / "metrics.jsonl")
    logger.write(1, {"loss": float("nan"), "high": np.float32("inf"), "returns": np.array([1.0, np.nan])})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text) == {"step": 1, "loss": None, "high": None, "returns": [1.0, None]}
    assert "NaN" not in text


def test_device_arrays_are_fetched(tmp_path):
    import jax.numpy as jnp

    JSONLLogger(tmp_path / "m.jsonl").write(1, {"loss": jnp.float32(0.25), "priorities": jnp.arange(2)})
    assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1, "loss": 0.25, "priorities": [0, 1]}]


def test_incomplete_last_line_is_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    assert [row["step"] for row in read_jsonl(path)] == [1]
    logger = JSONLLogger(path)
    logger.write(2, {"loss": 2.0})
    logger.close()
    assert read_jsonl(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]


def test_damaged_line_between_complete_rows_is_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n\0\0\0\n{"step": 3}\n')
    JSONLLogger(path).write(4, {})
    assert [row["step"] for row in read_jsonl(path)] == [1, 3, 4]


@pytest.mark.parametrize("kind", [JSONLLogger, CSVLogger])
def test_resumed_run_replaces_rows_after_its_checkpoint(tmp_path, kind):
    path = tmp_path / "metrics"
    logger = kind(path)
    for step in (10, 20, 30):
        logger.write(step, {"loss": float(step)})
    logger.close()
    logger = kind(path, resume_at=20)
    logger.write(30, {"loss": -1.0})
    logger.close()
    rows = read_jsonl(path) if kind is JSONLLogger else read_table(path)
    assert [(int(row["step"]), float(row["loss"])) for row in rows] == [(10, 10.0), (20, 20.0), (30, -1.0)]


def test_new_name_becomes_a_new_csv_column(tmp_path):
    path = tmp_path / "metrics.csv"
    logger = CSVLogger(path)
    logger.write(1, {"loss": 1.0})
    logger.write(2, {"loss": 2.0, "episode_return": 9.0})
    logger.write(3, {"episode_return": 8.0, "histogram": np.zeros(3), "note": "x"})
    logger.close()
    assert path.read_text() == "step,loss,episode_return\n1,1.0,\n2,2.0,9.0\n3,,8.0\n"
    assert sorted(os.listdir(tmp_path)) == ["metrics.csv"]


def test_resumed_run_keeps_the_columns_of_the_csv_file(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\n1,1.0\n2,2")
    logger = CSVLogger(path)
    logger.write(2, {"episode_return": 5.0, "loss": 4.0})
    logger.close()
    assert path.read_text() == "step,loss,episode_return\n1,1.0,\n2,4.0,5.0\n"


@pytest.mark.parametrize("kind", [JSONLLogger, CSVLogger])
def test_full_disk_raises_an_error_and_keeps_complete_rows(tmp_path, kind, monkeypatch):
    path = tmp_path / "metrics"
    logger = kind(path)
    logger.write(1, {"loss": 1.0})
    before = path.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))  # simulate a full disk: write only 3 bytes
    with pytest.raises(RlframeError, match=r"Could not write .*metrics: No space left on device.*--resume"):
        logger.write(2, {"loss": 2.0})
    monkeypatch.undo()
    assert path.read_bytes() == before
    logger.write(2, {"loss": 2.0})
    logger.close()
    assert len(path.read_text().splitlines()) == len(before.splitlines()) + 1


def test_writing_to_dev_full_raises_the_same_error():
    fd = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(RlframeError, match="Could not write the log: No space left on device"):
        append(fd, b"row\n", "the log")
    os.close(fd)


def test_folder_that_cannot_be_created_raises_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RlframeError, match=r"Could not write .*: Not a directory|File exists"):
        JSONLLogger(tmp_path / "file" / "metrics.jsonl")


def test_closing_twice_is_harmless(tmp_path):
    for logger in (JSONLLogger(tmp_path / "a"), CSVLogger(tmp_path / "b")):
        logger.close()
        logger.close()
