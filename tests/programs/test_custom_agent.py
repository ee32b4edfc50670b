"""Agents from the user's files run in every topology without changes."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from tests.programs.running_program import WITH_ELASTIC, options_of

ROOT = pathlib.Path(__file__).parents[2]
NORMALIZED = ["--normalize-observations", "--normalize-rewards"]
RANDOM = 22.0  # return of a random policy on CartPole


@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("agent", "env", "steps", "wanted", "options"),
    [
        ("custom_agent.py:Reinforce", "CartPole-v1", 150_000, 5 * RANDOM, []),
        ("custom_agent.py:Reinforce", "CartPole-v1", 150_000, 5 * RANDOM, NORMALIZED),
        ("recurrent_agent.py:Remembering", "PositionOnlyCartPole-v1", 300_000, 3 * RANDOM, []),
    ],
    ids=["reinforce", "normalized reinforce", "recurrent"],
)
@pytest.mark.parametrize("program_name", WITH_ELASTIC)
def test_custom_agent_learns_in_every_topology(program_name, agent, env, steps, wanted, options, tmp_path):
    command = [sys.executable, "-m", "rlframe", "train", "--agent", str(ROOT / "examples" / agent)]
    command += ["--env", env, "--num-envs", "8", *options_of(program_name), "--num-actors", "2", *options]
    command += ["--steps", str(steps), "--run-dir", str(tmp_path / "run"), "--quiet", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800.0)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["env_steps"] >= steps and result["learner_steps"] > 100
    # Check the best return, because a policy gradient agent can become worse after it has solved the task.
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert max(row.get("episode_return", 0.0) for row in rows) > wanted
