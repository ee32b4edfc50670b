"""Test that child processes which die with their parent do not die earlier, and the variables that they inherit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlframe.interprocess.processes import environment_variable

NAME = "RLFRAME_TEST_VARIABLE"

# A thread that outlives the main thread starts two processes. The first process starts before the interpreter begins to
# exit. The second process starts while the interpreter waits for this thread.
SCRIPT = """
import subprocess, sys, threading
from rlframe.interprocess.processes import start_process

CHILD = '''
import os, sys
from rlframe.interprocess.processes import die_with_parent
die_with_parent(os.getppid())
print("ready", flush=True)
for line in sys.stdin:
    print(line, end="", flush=True)
'''
started = threading.Event()

def say(process, what):
    process.stdin.write(what + b"\\n")
    process.stdin.flush()
    return process.stdout.readline().strip().decode()

def start():
    process = start_process([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\\n"
    return process

def work():
    first = start()
    started.set()
    threading.main_thread().join()
    second = start()
    print(say(first, b"first"), say(second, b"second"), first.poll(), second.poll())
    for process in (first, second):
        process.stdin.close()
        process.wait()

threading.Thread(target=work).start()
started.wait()
"""


def test_started_process_lives_while_the_interpreter_waits_for_a_thread():
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120.0)
    assert (ended.stdout, ended.stderr) == ("first second None None\n", "")


@pytest.mark.parametrize("before", ["old", None])
def test_variable_is_restored_after_the_block(monkeypatch, before) -> None:
    monkeypatch.delenv(NAME, raising=False)
    if before is not None:
        monkeypatch.setenv(NAME, before)
    with pytest.raises(KeyError), environment_variable(NAME, "new"):
        assert os.environ[NAME] == "new"
        raise KeyError
    assert os.environ.get(NAME) == before
