"""Presets solve CartPole in four rows (engine, topology, agent) of the table in docs/project/results-engines.md."""

from __future__ import annotations

import pathlib

import pytest

from tests.extras import needs
from tests.programs.running_program import RunningProgram

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

MIN_RETURN = {"ppo": 475.0, "impala": 450.0}


@pytest.mark.parametrize(
    ("engine", "topology", "agent"),
    [
        ("local", "light_env", "impala"),
        ("local", "distributed", "ppo"),
        ("local", "elastic", "ppo"),
        ("ray", "heavy_env", "ppo"),
    ],
)
def test_preset_solves_cartpole_with_at_least_one_of_two_seeds(
    tmp_path: pathlib.Path, engine: str, topology: str, agent: str
) -> None:
    if engine == "ray":
        needs("ray")
    arguments = (
        "--engine",
        engine,
        "--topology",
        topology,
        "--agent",
        agent,
        "--env",
        "CartPole-v1",
        "--num-actors",
        "2",
    )
    returns: list[float] = []
    for seed in ("1", "2"):
        with RunningProgram(tmp_path / seed, *arguments, "--seed", seed) as program:
            code, result = program.finish(400.0)
        assert code == 0 and result is not None, program.errors()
        returns.append(result["return_mean"])
        if returns[-1] >= MIN_RETURN[agent]:
            return
    pytest.fail(f"{agent} with {engine}, {topology}: returns {returns}, expected at least {MIN_RETURN[agent]:g}.")
