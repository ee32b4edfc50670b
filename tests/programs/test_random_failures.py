"""Runs end correctly although random processes receive SIGSTOP or SIGKILL. The launcher receives no signals.

The test prints its seed. `FAILURES_SEED=7 pytest ...` chooses the same signals again, but their timing can differ.
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
from tests.programs.test_hanging_nodes import ENV, OVERSHOOT

pytest.importorskip("fastapi", reason="the HTTP service needs fastapi: pip install rlframe[trajectories]")

STEPS = 60_000
SIGNALS = [signal.SIGSTOP] * 2 + [signal.SIGKILL] * 3
TIMEOUT = 700.0  # maximum seconds of the run


def send_random_signals(program: RunningProgram, rng: random.Random) -> list[str]:
    """Send each signal of `SIGNALS` to a random process. Wait a few seconds before each. Return their descriptions."""
    descriptions = []
    for number in rng.sample(SIGNALS, len(SIGNALS)):
        time.sleep(rng.uniform(0.5, 8.0))
        if program.process.poll() is not None:
            break
        name, process = rng.choice(sorted(program.alive().items()))
        descriptions.append(f"{number.name} to {name}")
        print(descriptions[-1])
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    return descriptions


@pytest.mark.system
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "program_name",
    ["local heavy_env", "local light_env", "local distributed", "launchpad distributed", "local elastic"],
)
def test_run_ends_and_leaves_no_processes_despite_random_failures(tmp_path: pathlib.Path, program_name: str) -> None:
    seed = int(os.environ.get("FAILURES_SEED") or random.randrange(10**6))
    print(f"FAILURES_SEED={seed}")
    (tmp_path / "env.py").write_text(ENV)
    arguments = [*IMPALA[:2], *IMPALA[4:], "--env", f"{tmp_path}/env.py:make_env", "--steps", str(STEPS)]
    arguments += ["--hang-timeout", "5", "--eval-episodes", "2", "--log-every", "500", *options_of(program_name)]
    program_class = ElasticProgram if program_name == "local elastic" else RunningProgram
    with program_class(tmp_path / "run", *arguments) as program:
        program.wait_for_steps(1_000, 400.0)
        sent = send_random_signals(program, random.Random(seed))
        code, result = program.finish(TIMEOUT)  # `finish` also checks that no process remains
    details = f"seed {seed}: {sent}\n{program.errors()}"
    assert len(sent) == len(SIGNALS), f"the run ended before all signals were sent: {details}"
    if code == 0:
        assert result is not None and STEPS <= result["env_steps"] <= OVERSHOOT * STEPS, details
    else:  # one node failed more often than max_restarts
        assert code == 1 and re.search(r"^rlframe: The node \S+ (hung|was killed|failed)", program.errors(), re.M), (
            details
        )
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_socket()]
    print(f"exit code {code}, {result['env_steps'] if result else 'no'} steps")
