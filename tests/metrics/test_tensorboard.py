"""Tests of TensorBoard event files, which are written without TensorFlow."""

from __future__ import annotations

import struct
import subprocess
import sys

import numpy as np
import pytest
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from rlframe.errors import RlframeError
from rlframe.metrics import TensorBoardLogger
from tests.extras import import_or_skip


def events(directory) -> list:
    """Return the events of all files, in order. Check the checksums of all records."""
    found = []
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            assert struct.unpack("<I", data[8:12]) == (masked_crc32c(data[:8]),)
            record = data[12 : 12 + length]
            assert struct.unpack("<I", data[12 + length : 16 + length]) == (masked_crc32c(record),)
            found.append(event_pb2.Event.FromString(record))
            data = data[16 + length :]
    return found


def test_numbers_become_curves_and_strings_are_omitted(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.write(100, {"loss": np.float32(0.5), "episodes": 3, "note": "x"})
    version, row = events(tmp_path)  # the row is in the file before `close`
    assert version.file_version == "brain.Event:2"
    assert row.step == 100
    assert {value.tag: value.simple_value for value in row.summary.value} == {"loss": 0.5, "episodes": 3.0}
    logger.close()
    logger.close()


def test_arrays_become_histograms_of_their_finite_values(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.write(1, {"returns": np.array([0.0, 1.0, 1.0, np.nan])})
    logger.close()
    histogram = events(tmp_path)[-1].summary.value[0].histo
    assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (0.0, 1.0, 3.0, 2.0)
    assert sum(histogram.bucket) == 3


def test_resumed_run_drops_points_after_its_checkpoint(tmp_path):
    first = TensorBoardLogger(tmp_path)
    for step in (10, 20, 30):
        first.write(step, {"loss": 1.0})
    first.close()
    second = TensorBoardLogger(tmp_path, resume_at=20)
    second.write(30, {"loss": 2.0})
    second.close()
    assert len(list(tmp_path.iterdir())) == 2
    start = [event for event in events(tmp_path) if event.HasField("session_log")]
    assert [(event.step, event.session_log.status) for event in start] == [(21, event_pb2.SessionLog.START)]


def test_tensorboard_reads_the_file(tmp_path):
    import_or_skip("tensorboard", "pip install 'rlframe[launchpad]'")
    logger = TensorBoardLogger(tmp_path)
    for step in range(5):
        logger.write(step, {"loss": float(step)})
    logger.close()
    program = (
        "import sys; sys.modules['tensorflow'] = None\n"  # simulates that TensorFlow is not installed
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        f"events = EventAccumulator({str(tmp_path)!r}); events.Reload()\n"
        "print([(scalar.step, scalar.value) for scalar in events.Scalars('loss')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]", done.stderr


def test_directory_that_cannot_be_created_raises_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RlframeError, match="Could not write"):
        TensorBoardLogger(tmp_path / "file" / "tensorboard")
