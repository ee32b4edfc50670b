"""Test the settings of malloc for a learner's process: it uses one arena, and keeps freed memory."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

COUNT_ARENAS = """
import ctypes, json, os, threading

libc = ctypes.CDLL(None)

def arenas():
    read, write = os.pipe()
    libc.fdopen.restype = ctypes.c_void_p
    file = ctypes.c_void_p(libc.fdopen(write, b"w"))
    assert libc.malloc_info(0, file) == 0
    libc.fclose(file)
    with open(read) as lines:
        return lines.read().count("<heap nr=")

def arenas_of_six_threads():
    together = threading.Barrier(7)
    def allocate():
        kept = bytearray(100_000)
        together.wait()
    threads = [threading.Thread(target=allocate) for _ in range(6)]
    for thread in threads:
        thread.start()
    together.wait()
    for thread in threads:
        thread.join()
    return arenas()
"""


def in_a_new_process(code: str, **env: str) -> list[object]:
    """Return the JSON value that `code` prints on its last line."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", COUNT_ARENAS + code]
    everything = {**environment, "JAX_PLATFORMS": "cpu", **env}
    return json.loads(subprocess.check_output(command, env=everything, cwd=ROOT).splitlines()[-1])


def test_threads_share_one_arena():
    code = """
from rlframe.interprocess.memory import use_one_arena
print(json.dumps([use_one_arena(), arenas_of_six_threads()]))
"""
    assert in_a_new_process(code) == [True, 1]


@pytest.mark.parametrize(
    "name, value",
    [("MALLOC_ARENA_MAX", "4"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=4:glibc.malloc.tcache_count=7")],
)
def test_number_of_arenas_set_by_an_environment_variable_is_not_changed(name, value):
    code = """
from rlframe.interprocess.memory import use_one_arena
print(json.dumps([use_one_arena(), arenas_of_six_threads()]))
"""
    assert in_a_new_process(code, **{name: value}) == [False, 4]


@pytest.mark.parametrize("name, several", [("learner", False), ("learner/0", False), ("actor/0", True)])
def test_only_learner_processes_have_one_arena(name, several):
    code = f"""
from rlframe.engines.supervision.node_main import begin_process
begin_process({name!r})
print(json.dumps([arenas_of_six_threads()]))
"""
    (arenas,) = in_a_new_process(code)
    assert arenas > 1 if several else arenas == 1


@pytest.mark.system
def test_learner_in_a_user_program_has_one_arena():
    code = """
from rlframe.learners import Learner, LearnerConfig
from tests.fakes import RecordingBuffer, counting_agent
learner = Learner(LearnerConfig(), counting_agent(), RecordingBuffer())
print(json.dumps([arenas_of_six_threads()]))
"""
    assert in_a_new_process(code) == [1]


FAULTS = """
import json, resource, sys
import numpy as np
from rlframe.interprocess.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(100_000_000, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = [faults() for _ in range(3)]
kept = keep_freed_memory()
print(json.dumps([kept, usual[-1], [faults() for _ in range(3)][-1]]))
"""


def faults_in_a_new_process(**env: str) -> tuple[bool, int, int]:
    """Return (result of `keep_freed_memory`, page faults for 100 MB before this call, page faults after this call)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", FAULTS]
    return tuple(json.loads(subprocess.check_output(command, env={**environment, "JAX_PLATFORMS": "cpu", **env})))


@pytest.mark.system
def test_freed_memory_is_reused_without_page_faults():
    kept, usual, after = faults_in_a_new_process()
    assert kept
    assert after <= usual / 10  # a new allocation of 100 MB causes 24,414 page faults, or about 50 with huge pages


@pytest.mark.system
def test_malloc_option_set_by_an_environment_variable_is_not_changed():
    kept, _, _ = faults_in_a_new_process(MALLOC_TOP_PAD_="0")
    assert not kept


@pytest.mark.system
def test_freed_memory_is_kept_if_the_environment_sets_only_the_number_of_arenas():
    kept, usual, after = faults_in_a_new_process(MALLOC_ARENA_MAX="2")
    assert kept
    assert after <= usual / 10
