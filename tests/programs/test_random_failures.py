"""Whole runs in which random processes are stopped for ever or killed, whichever they are but the launcher.

The seed is printed; `STRIKES_SEED=7 pytest ...` repeats the same strikes, as far as the machine lets it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import re
import signal
import time

import psutil
import pytest

from tests.programs.elastic_program import ElasticProgram
from tests.programs.running_program import IMPALA, RunningProgram, options_of
from tests.programs.test_hanging_nodes import ENV, MORE

pytest.importorskip("fastapi", reason="the control needs fastapi: pip install rlframe[trajectories]")

STEPS = 60_000
STRIKES = [signal.SIGSTOP] * 2 + [signal.SIGKILL] * 3
WITHIN = 700.0  # seconds


def strike(program: RunningProgram, chance: random.Random) -> list[str]:
    """Strikes at random, a few seconds apart. Returns what was struck, and how."""
    told = []
    for number in chance.sample(STRIKES, len(STRIKES)):
        time.sleep(chance.uniform(0.5, 8.0))
        if program.process.poll() is not None:
            break
        name, process = chance.choice(sorted(program.alive().items()))
        told.append(f"{number.name} to {name}")
        print(told[-1])
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    return told


@pytest.mark.system
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "which", ["local heavy_env", "local light_env", "local distributed", "launchpad distributed", "local elastic"]
)
def test_a_run_ends_by_itself_and_leaves_nothing_whichever_processes_are_struck(
    tmp_path: pathlib.Path, which: str
) -> None:
    seed = int(os.environ.get("STRIKES_SEED") or random.randrange(10**6))
    print(f"STRIKES_SEED={seed}")
    (tmp_path / "env.py").write_text(ENV)
    arguments = [*IMPALA[:2], *IMPALA[4:], "--env", f"{tmp_path}/env.py:make_env", "--steps", str(STEPS)]
    arguments += ["--hang-timeout", "5", "--eval-episodes", "2", "--log-every", "500", *options_of(which)]
    program_class = ElasticProgram if which == "local elastic" else RunningProgram
    with program_class(tmp_path / "run", *arguments) as program:
        program.wait_for_steps(1_000, 400.0)
        struck = strike(program, random.Random(seed))
        code, result = program.finish(WITHIN)  # which sees that no process and no shared memory is left
    told = f"seed {seed}: {struck}\n{program.errors()}"
    assert len(struck) == len(STRIKES), f"it was over before all strikes: {told}"
    if code == 0:
        assert result is not None and STEPS <= result["env_steps"] <= MORE * STEPS, told
    else:  # one node was struck more often than it may be
        assert code == 1 and re.search(r"^rlframe: The node \S+ (hung|was killed|failed)", program.errors(), re.M), told
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_socket()]
    print(f"exit code {code}, {result['env_steps'] if result else 'no'} steps")
