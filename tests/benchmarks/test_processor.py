"""Tests of the measured processor time of processes and their children."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.processor import Stopwatch, processor_seconds

# A program that uses 1 s of processor time (including its start), prints a line, and waits until stdin is closed.
CHILD = """
import sys, time
while time.process_time() < 1.0:
    pass
print(flush=True)
sys.stdin.read()
"""
# A program that starts a CHILD and uses little processor time itself.
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}])
child.wait()
"""


def start(program: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.communicate()


def test_processor_time_includes_living_and_ended_children():
    before = processor_seconds()
    process = start(CHILD)
    assert processor_seconds() - before >= 1.0
    end(process)
    assert 1.0 <= processor_seconds() - before < 1.9  # the child is not counted twice


def test_processor_time_includes_grandchildren():
    process = start(PARENT)
    assert 1.0 <= processor_seconds(process.pid) < 1.9
    end(process)
    assert processor_seconds(process.pid) == 0.0


def test_stopwatch_returns_the_processor_time_per_step():
    watch = Stopwatch()
    spent = time.process_time()
    while time.process_time() < spent + 0.5:
        pass
    rate = watch.rate(10)
    assert 50_000 <= rate["processor_us"] < 100_000
