"""Tests of loggers that pass rows to functions or to other loggers."""

from __future__ import annotations

import numpy as np
import pytest

from rlframe.errors import RlframeError
from rlframe.metrics import CallbackLogger, JSONLLogger, LenientLogger, MultiLogger, read_jsonl


class BrokenLogger:
    def write(self, step, values):
        raise RuntimeError("broken")

    def close(self):
        raise RuntimeError("broken")


def test_callback_receives_the_step_and_python_numbers():
    rows = []
    CallbackLogger(lambda step, values: rows.append((step, values))).write(5, {"loss": np.float32(1.5)})
    assert rows == [(5, {"loss": 1.5})]
    assert type(rows[0][1]["loss"]) is float


def test_write_raises_the_exception_of_a_callback():
    def stop(step, values):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        MultiLogger([CallbackLogger(stop)]).write(1, {})


def test_all_loggers_get_the_row_even_if_one_fails(tmp_path):
    after = JSONLLogger(tmp_path / "m.jsonl")
    logger = MultiLogger([BrokenLogger(), after])
    with pytest.raises(RuntimeError, match="broken"):
        logger.write(1, {"loss": 2.0})
    assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1, "loss": 2.0}]


def test_lenient_logger_warns_once_and_counts_the_lost_rows(caplog):
    disk = {"full": False}

    def write(step, values):
        if disk["full"]:
            raise RlframeError("no room")

    def pop_messages():
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return texts

    logger = LenientLogger([CallbackLogger(write)])
    for step in range(10):
        disk["full"] = 2 <= step < 5 or step == 9
        logger.write(step, {})
        expected = {2: ["A row of the logs is lost: no room"], 5: ["The logs are written again: 3 rows were lost."]}
        assert pop_messages() == expected.get(step, expected[2] if step == 9 else [])
    logger.close()
    assert pop_messages() == ["The logs end: 1 row was lost."]


def test_all_loggers_are_closed_even_if_one_fails():
    closed = []

    class RecordingClose(CallbackLogger):
        def close(self):
            closed.append(True)

    with pytest.raises(RuntimeError, match="broken"):
        MultiLogger([BrokenLogger(), RecordingClose(print)]).close()
    assert closed == [True]


def test_device_value_is_fetched_once_for_all_loggers():
    fetched = []

    class OnDevice:
        def __array__(self, dtype=None, copy=None):
            fetched.append(True)
            return np.array(2.0)

    rows = []
    callbacks = [CallbackLogger(lambda step, values: rows.append(values["loss"])) for _ in range(3)]
    MultiLogger(callbacks).write(1, {"loss": OnDevice()})
    assert rows == [2.0, 2.0, 2.0]
    assert len(fetched) == 1


def test_values_that_are_not_arrays_do_not_change():
    rows, table = [], object()
    CallbackLogger(lambda step, values: rows.append(values)).write(1, {"table": table, "list": [1, 2], "note": None})
    assert rows == [{"table": table, "list": [1, 2], "note": None}]
