"""What updates free is not faulted in again."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

FAULTS = """
import json, resource, sys
import numpy as np
from rlframe.learners.freed_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(100_000_000, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = [faults() for _ in range(3)]
kept = keep_freed_memory()
print(json.dumps([kept, usual[-1], [faults() for _ in range(3)][-1]]))
"""


def faults_in_a_process_of_its_own(**env: str) -> tuple[bool, int, int]:
    """(whether memory is kept, page faults of 100 MB before that, and after)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", FAULTS]
    return tuple(json.loads(subprocess.check_output(command, env={**environment, "JAX_PLATFORMS": "cpu", **env})))


@pytest.mark.system
def test_memory_that_was_freed_is_used_again_without_faults():
    kept, usual, after = faults_in_a_process_of_its_own()
    assert kept
    assert after <= usual / 10  # of 24,414 pages, or some 50 huge ones


@pytest.mark.system
def test_what_the_environment_says_of_malloc_holds():
    kept, _, _ = faults_in_a_process_of_its_own(MALLOC_TOP_PAD_="0")
    assert not kept


@pytest.mark.system
def test_memory_is_kept_where_the_environment_sets_only_the_number_of_arenas():
    kept, usual, after = faults_in_a_process_of_its_own(MALLOC_ARENA_MAX="2")
    assert kept
    assert after <= usual / 10
