"""Test the commands `python my_env.py serve|process|evaluate` in a process, and how their options are parsed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import urllib.request

import pytest

from rlframe.errors import UsageError
from rlframe.language.environments import APIServerConfig, BaseEnvConfig, EvalHandlingEnum, ServerBaseline, cli
from rlframe.language.environments.collecting import MAX_ITEMS_WITHOUT_GROUP
from tests.language.environments.letters import CommandLine
from tests.language.environments.model import Model, serving
from tests.language.environments.running import DEADLINE, pull, trainer
from tests.trajectories.serving import ROOT, running_service


@pytest.fixture()
def model():
    with serving(Model()) as one:
        yield one


def start(model: Model, folder, *arguments: str, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.language.environments.letters", *arguments, "--openai.base_url", model.url]
    paths = {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true"}
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **paths, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen, code: int = 0) -> str:
    try:
        printed, _ = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert process.returncode == code, printed
    return printed


@pytest.mark.system
def test_process_writes_groups_and_a_page_without_a_service(tmp_path, model):
    model.reply = lambda prompt, number: list(b"<b>&")
    options = ("--env.total_steps", "3", "--env.group_size=2", "--env.data_path_to_save_groups", "out/groups.jsonl")
    printed = finish(start(model, tmp_path, "process", *options, "--slurm", "false"))
    groups = [json.loads(line) for line in (tmp_path / "out/groups.jsonl").read_text().splitlines()]
    assert len(groups) == 3 and "out/groups.html" in printed
    for group in groups:
        assert [row[-4:] for row in group["tokens"]] == [list(b"<b>&")] * 2
        assert group["scores"] == [0.0, 1.0]
        assert group["messages"][0][0]["content"].endswith("<b>&")
    page = (tmp_path / "out/groups.html").read_text()
    assert "3 groups, 6 sequences, mean score 0.5" in page
    assert page.count("&lt;b&gt;&amp;") == 6 and "<b>" not in page
    finish(start(model, tmp_path, "process", *options))
    assert (tmp_path / "out/groups_1.jsonl").exists() and (tmp_path / "out/groups_1.html").exists()


@pytest.mark.system
def test_process_fails_if_many_items_give_no_group(tmp_path, model):
    printed = finish(start(model, tmp_path, "process", "--env.total_steps", "1", "--env.gives_no_group", "true"), 1)
    assert f"EnvError: {MAX_ITEMS_WITHOUT_GROUP} items in a row gave no group" in printed
    assert "0 of 1 groups" not in printed and not (tmp_path / "data").exists()


def test_evaluate_writes_its_results(tmp_path, model):
    options = ("--env.words", "x", "y", "z", "--env.data_dir_to_save_evals", "evals")
    printed = finish(start(model, tmp_path, "evaluate", *options))
    assert "evaluated 3" in printed
    results = json.loads((tmp_path / "evals/metrics.json").read_text())
    assert results["results"]["all"] == {"eval/answers": 3.0}
    assert results["config_general"] == {
        "model_name": "m",
        "total_evaluation_time_seconds": "2.0",
        "generation_parameters": {"max_new_tokens": 64},
    }
    samples = (tmp_path / "evals/samples.jsonl").read_text().splitlines()
    assert sorted(json.loads(sample)["answer"] for sample in samples) == ["A", "B", "C"]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with running_service(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.mark.system
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.system)]
)
def test_environment_disconnects_from_the_service_after_a_signal(service, tmp_path, model, number, code):
    url = f"{service.url}/runs/signal-{code}"
    with trainer(url) as client:
        process = start(model, tmp_path, "serve", "--env.rollout_server_url", url, "--env.use_wandb", "false")
        pull(client)
        model.open.clear()  # the environment waits for this request when the signal arrives
        process.send_signal(number)
        finish(process, code)
        with urllib.request.urlopen(f"{url}/report", timeout=DEADLINE) as answer:
            (env,) = json.load(answer)["envs"]
    assert (env["wandb_name"], env["connected"]) == ("letters_0", False)


@pytest.mark.system
def test_serve_logs_to_wandb_offline(service, tmp_path, model):
    url = f"{service.url}/runs/wandb"
    with trainer(url, num_steps=4, wandb_project="project", wandb_group="group") as client:
        options = (
            "--env.rollout_server_url",
            url,
            "--env.total_steps",
            "-1",
            "--env.min_items_sent_before_logging",
            "0",
        )
        process = start(model, tmp_path, "serve", *options)
        for _ in range(4):
            pull(client)
        printed = finish(process)
    (run,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    logged = run.read_bytes()
    for name in (b"letters_0_train/requests", b"letters_0_train/rollouts", b"server/server_0_request_time_avg"):
        assert name in logged
    assert "train/completion_lengths=1" in printed


@pytest.mark.system
def test_error_without_wandb_login_suggests_offline_mode(tmp_path, model):
    folder = {"HOME": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    online = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "WANDB_ERROR_REPORTING": "false", **folder}
    printed = finish(start(model, tmp_path, "evaluate", "--env.use_wandb", "true", **online), 2)
    assert "UsageError: Weights & Biases" in printed and "WANDB_MODE=offline" in printed
    assert "Traceback" not in printed


# --- options


def parsed(*arguments: str, command: str = "serve"):
    return cli.parse(CommandLine, command, arguments)


def test_command_line_overrides_file_and_file_overrides_class(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "env: {group_size: 16, max_num_workers: 3, words: [b, c]}\n"
        "openai: {base_url: 'http://file/v1', num_requests_for_eval: 9}\nslurm: true\n"
    )
    flags = ("--env.group-size", "8", "--openai.model_name", "x", "--slurm", "false")
    options = parsed("--config", str(file), *flags)
    assert (options.env.group_size, options.env.max_num_workers, options.env.max_token_length) == (8, 3, 64)
    assert (options.env.words, options.slurm) == (["b", "c"], False)
    (server,) = options.openai
    assert (server.base_url, server.model_name, server.num_requests_for_eval) == ("http://file/v1", "x", 9)


def test_empty_section_of_a_file_is_allowed(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("env:\nopenai:\n")
    assert parsed("--config", str(file)).model_dump() == parsed().model_dump()


def test_flags_are_parsed_by_the_type_of_their_field():
    env = parsed(
        *("--env.words", "one", "--env.weight", "None", "--env.eval_handling", "LIMIT_TRAIN"),
        *("--env.max_num_workers", "-1", "--env.use_wandb=no", "--env.include_messages", "--env.wandb_name", "12"),
    ).env
    assert (env.words, env.weight, env.eval_handling) == (["one"], None, EvalHandlingEnum.LIMIT_TRAIN)
    assert (env.max_num_workers, env.use_wandb, env.include_messages, env.wandb_name) == (-1, False, True, "12")
    assert parsed("--env.words", "[x, y]").env.words == ["x", "y"]


def test_defaults_depend_on_the_command():
    serve, processed = parsed().env, parsed(command="process").env
    assert (serve.use_wandb, serve.ensure_scores_are_not_same, serve.wandb_name) == (True, True, "letters")
    assert (processed.use_wandb, processed.ensure_scores_are_not_same, processed.include_messages) == (
        False,
        False,
        True,
    )
    assert processed.data_path_to_save_groups == "data/letters.jsonl"
    assert parsed(command="evaluate").env.use_wandb is False


def test_file_may_contain_several_servers(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("openai: [{base_url: 'http://a/v1'}, {base_url: 'http://b/v1', model_name: n}]")
    assert [one.base_url for one in parsed("--config", str(file)).openai] == ["http://a/v1", "http://b/v1"]
    with pytest.raises(UsageError, match="applies to one model server, but there are several"):
        parsed("--config", str(file), "--openai.model_name", "x")


def test_openai_flags_replace_local_servers():
    class Local(CommandLine):
        @classmethod
        def config_init(cls):
            return BaseEnvConfig(), ServerBaseline(model_name="m")

    assert cli.parse(Local, "serve", []).openai == ServerBaseline(model_name="m")
    servers = cli.parse(Local, "serve", ["--openai.base_url", "http://a/v1"]).openai
    assert servers == [APIServerConfig(base_url="http://a/v1", model_name="m")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--env.gruop_size", "8"), r"no option --env.gruop_size. Did you mean '--env.group_size'"),
        (("--openai.modelname", "8"), r"Did you mean '--openai.model_name'"),
        (("--slrum", "true"), r"Did you mean '--slurm'"),
        (("--env.group_size", "many"), r"--env.group_size: .*integer.*'many'"),
        (("--env.eval_limit_ratio", "2"), r"--env.eval_limit_ratio: .*less than or equal to 1.*2"),
        (("--env.eval_handling", "stop"), r"--env.eval_handling: .*STOP_TRAIN"),
        (("group_size", "8"), r"'group_size' is not an option"),
        (("--env.group_size", "8", "9"), r"--env.group_size does not take 2 values; got 8 9"),
        (("--config", "none.yaml"), r"none.yaml cannot be read"),
        (("--testing", "true"), r"made-up answers.*not supported"),
        (("--port", "8001"), r"--port and --openai.base_url both set the address of the model server"),
    ],
)
def test_invalid_options_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        parsed(*arguments, "--openai.base_url", "http://a/v1").make_env()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("env: {gruop_size: 8}", "no option 'gruop_size'. Did you mean 'group_size'"),
        ("evn: {}", "has an unknown option 'evn'. Did you mean 'env'"),
        ("[1]", "must contain a mapping of option names to values; got list"),
        ("env: 3", "env must be a mapping of option names to values; got 3"),
        ("a: [", "cannot be read"),
    ],
)
def test_invalid_config_files_are_refused(tmp_path, content, message):
    file = tmp_path / "config.yaml"
    file.write_text(content)
    with pytest.raises(UsageError, match=message):
        parsed("--config", str(file))


def test_errors_and_help_return_exit_codes(capsys):
    assert cli.run(CommandLine, ["serv"]) == 2
    assert "no command 'serv'. Commands: serve, process, evaluate. Did you mean 'serve'" in capsys.readouterr().err
    assert cli.run(CommandLine, ["serve", "--env.gruop_size", "1"]) == 2
    assert capsys.readouterr().err.startswith("UsageError: There is no option --env.gruop_size.")
    assert cli.run(CommandLine, ["serve", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "--env.words ['a']" in printed and "--openai.model_name m" in printed and "--slurm False" in printed
    assert cli.run(CommandLine, []) == 2


def test_help_is_escaped_if_stdout_is_ascii(monkeypatch):
    class Backwards(CommandLine):
        name = "rückwärts"

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed := io.BytesIO(), "ascii"))
    assert cli.run(Backwards, ["serve", "--help"]) == 0
    assert b"r\\xfcckw\\xe4rts" in printed.getvalue()


def test_config_refuses_unknown_options():
    with pytest.raises(ValueError, match="no option 'steps_per_evl'. Did you mean 'steps_per_eval'"):
        BaseEnvConfig(steps_per_evl=3)
