"""The agent DQN with all extensions of Rainbow learns in several processes."""

from __future__ import annotations

import pytest

from tests.programs.running_program import RunningProgram, options_of

PARTS = ["--double", "--prioritized", "--n-step", "3", "--network.dueling", "--network.noisy", "0.5"]
PARTS += [
    "--head",
    "categorical",
    "--head.value-min",
    "0",
    "--head.value-max",
    "100",
    "--epsilon",
    "0.0",
]
SIZES = ["--min-replay-size", "500", "--batch-size", "32", "--update-period", "4", "--discount", "0.99"]
SIZES += ["--optimizer", "adam", "--learning-rate", "1e-3", "--target-update-period", "100", "--network", "mlp"]


@pytest.mark.system
@pytest.mark.parametrize("program_name", ["local heavy_env", "launchpad distributed", "local elastic"])
def test_rainbow_learns_in_several_processes(program_name, tmp_path):
    options = ["--agent", "dqn", "--env", "CartPole-v1", "--preset", "none", *PARTS, *SIZES]
    options += ["--num-envs", "4", "--num-actors", "2", "--steps", "8000"]
    with RunningProgram(tmp_path / "run", *options, *options_of(program_name)) as program:
        code, result = program.finish(300.0)
    assert code == 0 and result is not None
    assert result["learner_steps"] >= 0.8 * (result["env_steps"] - 500) / 4
    assert result["return_mean"] > 40.0  # a random policy has a return of 22
