"""Tests of the command line's options, output and errors. The tests call its functions in this process."""

from __future__ import annotations

import io
import json
import pathlib
import shutil
import sys

import pytest

from rlframe.cli import main
from rlframe.cli.listings import print_preset
from rlframe.cli.parsing import raw_option_values
from rlframe.cli.train_options import read_arguments
from rlframe.errors import UsageError
from tests.extras import needs

REMEMBERING = f"{pathlib.Path(__file__).parents[1]}/examples/recurrent_agent.py:Remembering"
TINY = ["--env-type", "loop", "--num-envs", "2", "--steps", "64", "--unroll-length", "16", "--num-epochs", "1"]
TINY += ["--eval-episodes", "1", "--network", "mlp", "--network.hidden", "8"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the directory of a small finished run. Tests share this directory, and must not change it."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", *TINY, "--quiet", "--seed", "5", "--run-dir", str(run_dir)]) == 0
    return run_dir


def refused(capsys, *arguments: str, code: int = 2) -> str:
    """Run a command that must fail. Return the error message, which must be one line."""
    assert main(list(arguments)) == code
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rlframe: ")]
    assert len(lines) == 1
    return lines[0].removeprefix("rlframe: ")


def test_fields_of_the_agent_config_are_options():
    described, _, preset = read_arguments(["--agent", "ppo", "--env=CartPole-v1", "--learning-rate", "0.5"])
    assert described.agent_config.learning_rate == 0.5
    assert described.agent_config.num_epochs == 20  # The value comes from the preset.
    assert preset.name == "ppo/cartpole"


def test_config_defaults_are_used_without_a_preset():
    described, _, preset = read_arguments(["--preset", "none"])
    assert preset is None
    assert described.agent_config == type(described.agent_config)()


def test_network_options_change_the_network_config():
    described, _, _ = read_arguments(["--network", "mlp", "--network.hidden", "256", "128"])
    assert described.topology_config.network == "mlp"
    assert described.topology_config.network_config.hidden == (256, 128)


def test_option_env_kwargs_is_parsed_as_json():
    described, _, _ = read_arguments(["--env-kwargs", '{"sutton_barto_reward": true}'])
    assert described.env_kwargs == {"sutton_barto_reward": True}


def test_options_of_nested_configs_have_a_prefix():
    arguments = ["--agent", "grpo", "--env", "examples/llm/reverse.py:Reverse", "--model.hidden-size", "64"]
    described, _, preset = read_arguments([*arguments, "--dtype", "bfloat16"])
    config = described.agent_config
    assert (preset.name, config.model.hidden_size, config.model.num_hidden_layers) == ("grpo/reverse", 64, 2)
    assert (config.dtype, config.model.dtype, config.model_config.dtype) == ("bfloat16", "float32", "bfloat16")


@pytest.mark.parametrize(("chosen", "left_out"), [("gru", True), ("mlp", False)])
def test_table_of_preset_values_omits_options_of_an_unused_network(chosen, left_out):
    described, _, preset = read_arguments(["--agent", "dqn", "--env", "CartPole-v1", "--network", chosen])
    table = io.StringIO()
    print_preset(preset, described, table)
    lines = [line.split() for line in table.getvalue().splitlines()]
    assert (["network", "gru", "(preset:", "mlp)", "command", "line"] in lines) == left_out
    assert ("network.hidden" not in [line[0] for line in lines if line]) == left_out


def test_switch_options_set_booleans():
    described, session, _ = read_arguments(["--no-normalize-advantages", "--json"])
    assert described.agent_config.normalize_advantages is False
    assert session.json is True


def test_default_number_of_actors_is_at_most_the_number_of_environments():
    sac = ["--agent", "sac", "--env", "Pendulum-v1", "--topology", "heavy_env"]  # In this preset, num_envs is 1.
    assert read_arguments(sac)[0].topology_config.num_actors == 1
    assert read_arguments([*sac, "--num-envs", "4"])[0].topology_config.num_actors == 2
    assert read_arguments([*sac, "--num-envs", "4", "--num-actors", "4"])[0].topology_config.num_actors == 4
    with pytest.raises(UsageError, match="num_envs=1 cannot be shared evenly by num_actors=2"):
        read_arguments([*sac, "--num-actors", "2"])


@pytest.mark.system
def test_option_config_loads_a_config_that_other_options_change(trained):
    again, _, preset = read_arguments(["--config", f"{trained}/config.json", "--seed", "6", "--discount", "0.5"])
    assert preset is None
    assert (again.seed, again.num_envs, again.topology_config.network_config.hidden) == (6, 2, (8,))
    assert (again.agent_config.discount, again.agent_config.unroll_length) == (0.5, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --lerning-rate 1", "There is no option --lerning-rate. Did you mean '--learning-rate'?"),
        (
            "train --network mlp --network.hiden 1",
            "There is no option --network.hiden. Did you mean '--network.hidden'?",
        ),
        (
            "train --network.channels 8",
            "--network.channels depends on the value of --network: give --network too.",
        ),
        (
            "train --agent dqn --vtrace-lambda 1",
            "There is no option --vtrace-lambda. Agents with this option: impala",
        ),
        ("train --agent sac --no-double", "There is no option --no-double. Agents with this option: dqn."),
        ("train --steps many", "Error parsing --steps: invalid literal for int() with base 10: 'many'."),
        ("train --steps 0", "steps must be at least 1, got 0."),
        ("train --env-type lop", "invalid choice 'lop' for argument '--env-type'."),
        ("train --env-kwargs {", "Error parsing --env-kwargs: '{' is not JSON"),
        ("train --discount 2", "PPOConfig.discount must be in [0, 1], got 2.0."),
        ("train --json true", "Unexpected argument 'true'. A switch has no value"),
        ("train --agent pop", "Did you mean 'ppo'?"),
        ("train --agent nothing.py:Here", "There is no file"),
        ("train --network mpl", "Did you mean 'mlp'?"),
        ("train --preset ppo/cartpol", "Did you mean 'ppo/cartpole'?"),
        ("train --env CartPol-v1", "Unknown environment 'CartPol-v1'. Did you mean 'CartPole-v1'?"),
        ("train --agent dqn --env Pendulum-v1 --preset none", "DQN needs Discrete actions"),
        ("train --agent dqn --normalize-rewards", "DQN: normalize_rewards is for agents that learn from a Sequence"),
        (
            f"train --agent {REMEMBERING} --env Pendulum-v1",
            "Remembering needs Discrete actions, got the action spec Bou",
        ),
        (f"train --agent {REMEMBERING} --network mlp", "Remembering makes its own network and reads no net_fact"),
        ("train --agent sac", "SAC needs continuous actions, a Box of floats; got the action spec DiscreteArray"),
        ("train --at-once 2", "--at-once 2 needs --seeds: without it, there is only one run."),
        ("train --config nothing.json", "Cannot read nothing.json: No such file or directory."),
        ("train --resume", "--resume needs --run-dir"),
        ("train --agent --env CartPole-v1", "Missing value for argument '--agent'."),
        ("train --resume --run-dir nothing", "There is no run in nothing"),
        ("evaluate", "RUN_DIR"),
        ("evaluate nothing", "/nothing: it has no config.json."),
        ("evaluate nothing --episodes 0", "--episodes must be at least 1, got 0."),
        ("evaluate nothing --seed -1", "--seed must be between 0 and 2147483647, got -1."),
        ("plot", "Name one or more run directories."),
        ("plot nothing", "nothing has no metrics.jsonl"),
        ("envs NoSuchThing", "No environment has 'NoSuchThing' in its name."),
        (
            "trian",
            "there are train, sweep, evaluate, plot, check-env, envs, agents, serve, "
            "status, scale, pause, unpause, stop, doctor, bench. Did you mean 'train'?",
        ),
    ],
)
def test_error_for_wrong_input_is_one_sentence_with_exit_code_2(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *arguments.split())
    assert list(tmp_path.rglob("*.json")) == []


def test_raw_option_values_returns_a_dict_from_option_name_to_text():
    words = "--agent dqn --head.num-atoms=21 --quiet --network.hidden 32 16 --seed -1 --env_kwargs={} --agent=ppo"
    texts = {"agent": "ppo", "head.num_atoms": "21", "quiet": "", "network.hidden": "32", "seed": "-1"}
    assert raw_option_values(words.split()) == {**texts, "env_kwargs": "{}"}


def test_existing_run_directory_is_refused(capsys, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "exists already" in refused(capsys, "train", "--run-dir", str(tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_agent_config_with_a_field_named_like_an_option_is_refused(capsys, tmp_path):
    (tmp_path / "agent.py").write_text(
        "import dataclasses\nfrom rlframe import Agent\n\n@dataclasses.dataclass(frozen=True)\nclass Config:\n"
        "    seed: int = 0\n\nclass Mine(Agent):\n    config_cls = Config\n"
    )
    message = refused(capsys, "train", "--agent", f"{tmp_path}/agent.py:Mine")
    assert "has a field 'seed', but `rlframe train` already has an option of this name." in message


def test_error_in_an_environment_builder_is_printed_as_one_sentence(capsys, tmp_path):
    (tmp_path / "env.py").write_text("def make():\n    raise RuntimeError('no license')\n")
    arguments = ["train", "--env", f"{tmp_path}/env.py:make", "--run-dir", f"{tmp_path}/run"]
    assert "RuntimeError: no license" in refused(capsys, *arguments, code=1)
    assert not (tmp_path / "run").exists()


def test_error_for_an_observation_that_does_not_match_its_space_is_one_sentence(capsys, tmp_path):
    (tmp_path / "env.py").write_text(
        "import gymnasium\nimport numpy as np\n\nclass Wrong(gymnasium.Wrapper):\n"
        "    def step(self, action):\n        _, *rest = self.env.step(action)\n        return np.zeros(7), *rest\n\n"
        "def make():\n    return Wrong(gymnasium.make('CartPole-v1'))\n"
    )
    arguments = ["train", "--env", f"{tmp_path}/env.py:make", "--run-dir", f"{tmp_path}/run", "--quiet"]
    assert main(arguments) in (1, 2)
    assert "7" in capsys.readouterr().err.splitlines()[-1]


def test_damaged_checkpoint_is_reported_and_not_changed(capsys, tmp_path, trained):
    run_dir = shutil.copytree(trained, tmp_path / "run")
    capsys.readouterr()
    damaged = [path for path in (run_dir / "checkpoints").rglob("*") if path.is_file() and path.name != "versions.json"]
    for path in damaged:
        path.write_bytes(b"\0" * 10)
    assert "is damaged" in refused(capsys, "evaluate", str(run_dir), code=1)
    resume = ["train", "--resume", "--run-dir", str(run_dir), "--steps", "128", "--quiet"]
    assert "is damaged" in refused(capsys, *resume, code=2)
    assert all(path.read_bytes() == b"\0" * 10 for path in damaged)


def test_unexpected_error_is_one_sentence_and_option_traceback_adds_the_traceback(capsys, monkeypatch):
    def broken(arguments):
        raise KeyError("lost")

    monkeypatch.setattr("rlframe.cli.listings.agents", broken)
    assert main(["agents"]) == 1
    assert capsys.readouterr().err == (
        "rlframe: KeyError: 'lost' (test_cli.py, line "
        + str(broken.__code__.co_firstlineno + 1)
        + "). Add --traceback to print the traceback.\n"
    )
    assert main(["agents", "--traceback"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "exit_code", "printed"),
    [(None, 0, ""), (3, 3, ""), ("no license", 1, "rlframe: no license\n"), (2.5, 1, "rlframe: 2.5\n")],
)
def test_sys_exit_in_a_command_sets_the_exit_code_as_in_python(capsys, monkeypatch, code, exit_code, printed):
    monkeypatch.setattr("rlframe.cli.listings.agents", lambda arguments: sys.exit(code))
    assert main(["agents"]) == exit_code
    assert capsys.readouterr().err == printed


def test_json_result_is_the_last_line_of_stdout(capsys, tmp_path):
    assert main(["train", *TINY, "--json", "--run-dir", f"{tmp_path}/run"]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert list(result) == [
        *("env_steps", "learner_steps", "return_mean", "return_std", "episodes", "steps_per_second", "wall_seconds"),
        *("params_version", "run_dir", "stopped_by", "evaluation"),
    ]
    assert set(result["evaluation"]) == {"return_mean", "return_std", "length_mean", "episodes"}
    assert result["env_steps"] >= 64 and result["episodes"] == 1 and result["run_dir"] == f"{tmp_path}/run"


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # The test starts a child process to read the video.
def test_evaluate_command_records_a_video(capsys, tmp_path, trained):
    needs("gymnasium")
    import imageio_ffmpeg

    capsys.readouterr()
    arguments = ["evaluate", str(trained), "--episodes", "1", "--video", f"{tmp_path}/a/b.mp4", "--json"]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["return_mean"] == json.loads((trained / "result.json").read_text())["return_mean"]
    frames = imageio_ffmpeg.read_frames(f"{tmp_path}/a/b.mp4")
    assert next(frames)["size"] == (600, 400)
    assert len(list(frames)) > 8


def test_plot_command_prints_the_path_of_the_plot(capsys, tmp_path, trained):
    capsys.readouterr()
    assert main(["plot", str(trained), "--out", f"{tmp_path}/curve.png"]) == 0
    assert capsys.readouterr().out.strip() == f"{tmp_path}/curve.png"
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_agents_command_lists_presets(capsys):
    assert main(["agents"]) == 0
    out = capsys.readouterr().out
    assert "ppo: " in out and "dqn/cartpole" in out
    assert main(["agents", "ppo"]) == 0
    assert "--learning-rate" in capsys.readouterr().out
    assert main(["agents", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dqn"]["options"]["batch_size"] == 32


def test_envs_command_lists_libraries(capsys):
    assert main(["envs", "cartpole-v1"]) == 0
    listed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["CartPole-v1", "envpool"] in listed and ["CartPole-v1", "gymnasium"] in listed
    assert all("CartPole-v1" in name for name, _ in listed)


def test_help_and_version_are_printed(capsys):
    assert main(["--help"]) == 0
    assert "rlframe train" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["train", "--help"]) == 0
    assert "--learning-rate" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rlframe 0.")
