"""Processor time of processes."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.processor import Stopwatch, processor_seconds

# Takes 1 s of a processor, its start included, says so, and waits for its stdin to be closed.
CHILD = """
import sys, time
while time.process_time() < 1.0:
    pass
print(flush=True)
sys.stdin.read()
"""
# Has a CHILD of its own, and takes little itself.
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


def test_processor_time_is_of_children_that_live_and_that_have_ended():
    before = processor_seconds()
    process = start(CHILD)
    assert processor_seconds() - before >= 1.0
    end(process)
    assert 1.0 <= processor_seconds() - before < 1.9  # once, not twice


def test_processor_time_is_of_children_of_children():
    process = start(PARENT)
    assert 1.0 <= processor_seconds(process.pid) < 1.9
    end(process)
    assert processor_seconds(process.pid) == 0.0


def test_a_stopwatch_divides_both_times_by_the_steps():
    watch = Stopwatch()
    spent = time.process_time()
    while time.process_time() < spent + 0.5:
        pass
    rate = watch.rate(10)
    assert 50_000 <= rate["processor_us"] < 100_000
