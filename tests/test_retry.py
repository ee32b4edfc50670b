"""Tests of the exponential backoff between retries."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace

import pytest

from rlframe import retry


def test_pauses_double_up_to_the_maximum():
    assert list(itertools.islice(retry.backoff(0.1, 0.5), 5)) == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_last_pause_ends_at_the_deadline(monkeypatch):
    now = 100.0
    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=lambda: now))
    waited = []
    for pause in retry.backoff(1.0, 4.0, 10.0):
        waited.append(pause)
        now += pause
    assert waited == [1.0, 2.0, 4.0, 3.0]


def test_backoff_yields_no_pause_after_the_deadline():
    assert list(retry.backoff(0.1, 1.0, 5.0, since=time.monotonic() - 6.0)) == []


def test_jitter_shortens_pauses_by_at_most_the_given_fraction():
    first = [next(retry.backoff(2.0, 9.0, jitter=0.25)) for _ in range(200)]
    assert 1.5 <= min(first) < max(first) <= 2.0
    assert sum(first) / 200 == pytest.approx(1.75, abs=0.1)
