"""Four of the cells of docs/engines.md: the presets still solve CartPole, as that page's commands run them."""

from __future__ import annotations

import pathlib

import pytest

from tests.extras import needs
from tests.programs.running_program import RunningProgram

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

WANTED = {"ppo": 475.0, "impala": 450.0}


@pytest.mark.parametrize(
    ("engine", "topology", "agent"),
    [
        ("local", "light_env", "impala"),
        ("local", "distributed", "ppo"),
        ("local", "elastic", "ppo"),
        ("ray", "heavy_env", "ppo"),
    ],
)
def test_a_preset_solves_cart_pole_with_its_first_seed_or_its_second(
    tmp_path: pathlib.Path, engine: str, topology: str, agent: str
) -> None:
    if engine == "ray":
        needs("ray")
    told = ("--engine", engine, "--topology", topology, "--agent", agent, "--env", "CartPole-v1", "--num-actors", "2")
    returns: list[float] = []
    for seed in ("1", "2"):
        with RunningProgram(tmp_path / seed, *told, "--seed", seed) as program:
            code, result = program.finish(400.0)
        assert code == 0 and result is not None, program.errors()
        returns.append(result["return_mean"])
        if returns[-1] >= WANTED[agent]:
            return
    pytest.fail(f"{agent} under {engine}, {topology}: {returns}, and {WANTED[agent]:g} was wanted.")
