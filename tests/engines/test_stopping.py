"""`StopSignal` handles signals that end a run."""

from __future__ import annotations

import os
import signal

import pytest

from rlframe.engines.stopping import StopSignal


def test_first_signal_is_recorded_and_second_signal_raises():
    with StopSignal(quiet=True) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.number == signal.SIGTERM and not stop.is_repeated
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.number == signal.SIGTERM and stop.is_repeated


def test_first_signal_raises_during_interruptible_work():
    with StopSignal(quiet=True) as stop:
        with pytest.raises(KeyboardInterrupt), stop.interruptible():
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.number == signal.SIGINT and not stop.is_repeated


def test_first_signal_after_interruptible_work_is_recorded():
    with StopSignal(quiet=True) as stop:
        with stop.interruptible():
            pass
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.number == signal.SIGINT
