"""In every topology, each update packs the new parameters once, and only jitted functions unpack parameters."""

from __future__ import annotations

import collections
import pathlib

import pytest

from tests.programs.running_program import WITH_ELASTIC, RunningProgram, options_of
from tests.programs.test_language import SMALL

# These agents log each call of a pack or unpack method to a file. All nodes of a program use one of these agents.
AGENTS = """
import os

import jax

from rlframe.agents import GRPO, IMPALA
from rlframe.params.packing import Packing


def count(name):
    method = getattr(Packing, name)

    def counted(self, *args):
        # Count only parameters: no other packed tree has matrices with these names.
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(self.template)]
        if any(path.endswith(("['w']", "['q_proj']")) for path in paths):
            with open({counts!r}, "a") as file:
                file.write(f"{{name}} {{os.getpid()}}\\n")
        return method(self, *args)

    setattr(Packing, name, counted)


def count_all():
    if not hasattr(Packing, "counted"):
        Packing.counted = True
        for name in ("pack_jax", "unpack_jax", "pack_numpy", "unpack_numpy"):
            count(name)


class CountingIMPALA(IMPALA):
    def __init__(self, *args, **kwargs):
        count_all()
        super().__init__(*args, **kwargs)


class CountingGRPO(GRPO):
    def __init__(self, *args, **kwargs):
        count_all()
        super().__init__(*args, **kwargs)
"""


def counts_of(tmp_path: pathlib.Path, agent: str, *arguments: str) -> tuple[dict[str, list[int]], int]:
    """Run a program. Return (method -> sorted list with its calls in each process, number of parameter versions)."""
    path, counts = tmp_path / "agents.py", tmp_path / "counts"
    path.write_text(AGENTS.format(counts=str(counts)))
    with RunningProgram(tmp_path / "run", "--agent", f"{path}:{agent}", *arguments) as program:
        code, result = program.finish()
    assert code == 0 and result is not None, program.errors()
    found: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for line in counts.read_text().splitlines():
        name, process = line.split()
        found[name][process] += 1
    return {name: sorted(of.values()) for name, of in found.items()}, result["params_version"]


@pytest.mark.system
@pytest.mark.parametrize("program_name", WITH_ELASTIC)
def test_parameters_are_packed_and_unpacked_only_in_jitted_calls(tmp_path, program_name):
    arguments = ["--env", "CartPole-v1", "--num-envs", "8", "--num-actors", "2", "--steps", "20000"]
    arguments += ["--unroll-length", "10", "--batch-size", "4"]
    found, versions = counts_of(tmp_path, "CountingIMPALA", *arguments, *options_of(program_name))
    assert versions > 100
    # Only the monitor packs with numpy, once for each checkpoint that it evaluates.
    assert sum(found.pop("pack_numpy", [])) < 10
    assert set(found) == {"pack_jax", "unpack_jax"}
    # A call in a jitted function is logged only when JAX traces it. The learner packs in its update, and the monitor in
    # its template of a checkpoint. The others only unpack.
    assert len(found["pack_jax"]) <= 2
    assert max(found["pack_jax"] + found["unpack_jax"]) < 10


@pytest.mark.system
def test_language_model_parameters_are_packed_only_in_the_update(tmp_path):
    found, versions = counts_of(
        tmp_path, "CountingGRPO", *SMALL[2:], "--steps", "12"
    )  # the first two arguments of `SMALL` choose another agent
    assert versions >= 12
    # The policy server has no agent, so the calls in its process are not counted.
    assert set(found) == {"pack_jax"} and len(found["pack_jax"]) == 1 and max(found["pack_jax"]) < 10
