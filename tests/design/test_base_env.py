"""Check that the names, signatures and command lines in the design document of BaseEnv work."""

from __future__ import annotations

import asyncio
import inspect
import socket
import sys

import pytest
from pydantic import Field

from rlframe.errors import EnvError, UsageError
from rlframe.language.environments import (
    APIServerConfig,
    BaseEnv,
    BaseEnvConfig,
    OpenaiConfig,
    ScoredDataItem,
    ServerBaseline,
    cli,
)
from rlframe.language.environments.collecting import Collector
from rlframe.language.environments.metrics import GroupStatistics
from rlframe.language.environments.server_manager import resolve_servers
from tests.pipes import run_with_closed_pipe


class Document(BaseEnv):
    """A BaseEnv with only the methods that the design document requires."""

    name = "document"

    async def setup(self):
        self.items = iter(range(100))

    async def get_next_item(self):
        return next(self.items)

    async def collect_trajectory(self, item):
        number = len(self.gathered)
        self.gathered.append(number)
        return self.trajectory(number), [f"follow-up {number}"]

    async def evaluate(self, *args, **kwargs):
        async def one(task):
            await asyncio.sleep(0)
            self.seen = max(self.seen, len(self.eval_workers))
            return task

        self.results = await self.gather_eval(one(task) for task in range(5))

    def trajectory(self, number):
        return ScoredDataItem(tokens=[1, number], masks=[-100, number], scores=float(number))


def made(env_cls=Document, **options):
    config = BaseEnvConfig(**{"group_size": 4, "use_wandb": False, "max_eval_workers": 3, **options})
    env = env_cls(config, [APIServerConfig(base_url="http://127.0.0.1:1/v1")])
    env.gathered, env.seen = [], 0
    return env


METHODS = {
    "setup": "(self)",
    "get_next_item": "(self)",
    "collect_trajectory": "(self, item)",
    "evaluate": "(self, *args, **kwargs)",
    "collect_trajectories": "(self, item)",
    "postprocess_histories": "(self, trajectories)",
    "wandb_log": "(self, wandb_metrics=None)",
    "save_checkpoint": "(self, step, data=None)",
    "config_init": "()",
    "cleanup": "(self)",
    "add_rollouts_for_wandb": "(self, scored_data, item=None)",
    "create_rollout_table": "(self, wandb_metrics)",
    "load_checkpoint": "(self)",
    "handle_env": "(self, item)",
    "cli": "()",
    "get_cli_serve_config_cls": "()",
    "get_cli_process_config_cls": "()",
}


@pytest.mark.parametrize("name", METHODS)
def test_method_signature_matches_the_design_document(name):
    signature = inspect.signature(getattr(BaseEnv, name))
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    assert str(signature.replace(parameters=plain, return_annotation=inspect.Parameter.empty)) == METHODS[name]


@pytest.mark.parametrize("name", ["handle_send_to_api", "add_train_workers", "env_manager", "process_manager"])
def test_base_env_has_each_coroutine_in_the_design_document(name):
    assert inspect.iscoroutinefunction(getattr(BaseEnv, name))


def test_config_init_returns_the_types_in_the_design_document():
    config, servers = BaseEnv.config_init()
    assert type(config) is BaseEnvConfig and type(servers) is ServerBaseline
    assert OpenaiConfig is APIServerConfig


def test_collect_trajectory_is_called_once_per_sequence_and_fills_the_backlog():
    group, backlog = asyncio.run(made().collect_trajectories("item"))
    assert group["tokens"] == [[1, 0], [1, 1], [1, 2], [1, 3]] and group["scores"] == [0.0, 1.0, 2.0, 3.0]
    assert backlog == [f"follow-up {number}" for number in range(4)]


def test_group_excludes_a_trajectory_that_is_none():
    class Some(Document):
        def trajectory(self, number):
            return None if number == 1 else super().trajectory(number)

    env = made(Some)
    env.process_mode = True
    assert asyncio.run(env.handle_env("item"))  # the group is kept, although one trajectory is missing
    assert env.collected.scores == [0.0, 2.0, 3.0]


def test_postprocess_histories_may_convert_any_type_of_trajectory():
    class Anything(Document):
        def trajectory(self, number):
            return ("history", number)

        async def postprocess_histories(self, trajectories):
            self.given = list(trajectories)
            items = [super(Anything, self).trajectory(number) for _, number in trajectories]
            return {name: [item[name] for item in items] for name in ("tokens", "masks", "scores")}

    env = made(Anything, data_path_to_save_groups=None)
    env.process_mode = True
    assert asyncio.run(env.handle_env("item"))
    assert env.given == [("history", 0), ("history", 1), ("history", 2), ("history", 3)]
    assert env.collected.scores == [0.0, 1.0, 2.0, 3.0] and env.backlog[0] == "follow-up 0"


def test_result_that_is_not_a_group_is_refused():
    class Forgets(Document):
        def trajectory(self, number):
            return "text"

    env = made(Forgets)
    env.process_mode = True
    with pytest.raises(EnvError, match=r"Forgets can only send groups \(ScoredDataGroup\), got str. .*postprocess"):
        asyncio.run(env.handle_env("item"))


def test_evaluation_runs_the_maximum_number_of_tasks_concurrently():
    env = made()
    asyncio.run(env.evaluate())
    assert env.results == list(range(5)) and env.seen == 3 and not env.eval_workers


class Tracker:
    def __init__(self):
        self.rows = []

    def write(self, step, values):
        self.rows.append(dict(values))

    def table(self, columns, rows):
        return len(rows)

    def close(self):
        pass


def test_number_of_active_workers_is_logged():
    class Waits(Document):
        async def get_next_item(self):
            return "item"

        async def collect_trajectory(self, item):
            await asyncio.Event().wait()

    env = made(Waits, max_num_workers=3)
    env.process_mode, env.tracker = True, Tracker()
    assert asyncio.run(workers_while_collecting(env)) == 3
    assert env.tracker.rows[-1]["train/active_workers"] == 3
    asyncio.run(env.wandb_log())
    assert env.tracker.rows[-1]["train/active_workers"] == 0


async def workers_while_collecting(env):
    """Start all workers, call `wandb_log` while they collect groups, and return the number of workers."""
    env.collector = Collector(env.next_item, env.handle_env, env.statistics, timeout=0)
    env.workers = env.collector.under_way
    await env.add_train_workers()
    await asyncio.sleep(0)
    working = len(env.workers)
    await env.wandb_log()
    await env.collector.stop()
    return working


def test_evaluate_log_writes_the_given_metrics():
    env = made()
    env.tracker, env.wandb_prepend = Tracker(), "document_0"
    asyncio.run(env.evaluate_log({"eval/right": 0.5, "accuracy": 1.0, "note": "text"}))
    assert env.tracker.rows == [{"document_0_eval/right": 0.5, "document_0_eval/accuracy": 1.0}]


def test_staleness_is_computed_from_the_newest_sampling_version():
    found = GroupStatistics()
    found.add([1.0], 3, 5)
    found.add([0.0], 4, 4)
    found.add([0.0], None, None)
    assert found.report() == {
        "train/score_mean": pytest.approx(1 / 3),
        "train/score_std": pytest.approx(2**0.5 / 3),
        "train/score_max": 1.0,
        "train/score_min": 0.0,
        "train/reward": pytest.approx(1 / 3),
        "train/staleness": 1.5,
    }
    assert found.report() == {}


def test_reward_and_queue_sizes_are_logged_by_default():
    env = made()
    env.process_mode, env.tracker = True, Tracker()
    env.status_dict = {"queue_size": 7, "self_queue_size": 3}
    asyncio.run(env.handle_env("item"))
    asyncio.run(env.wandb_log({"my_custom_metric": 2.0}))
    (row,) = env.tracker.rows
    assert (row["my_custom_metric"], row["train/reward"], row["train/score_max"]) == (2.0, 1.5, 3.0)
    assert (row["train/queue_size"], row["train/self_queue_size"]) == (7, 3)
    asyncio.run(env.wandb_log())
    assert "train/reward" not in env.tracker.rows[-1]
    env.log_pause(True)
    assert env.tracker.rows[-1] == {"train/paused": 1}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("serve --port 8001", {"port": 8001}),
        ("serve --openai.base_url http://localhost:8001/v1 --slurm false", {"slurm": False}),
        ("process --env.total_steps 3 --env.data_path_to_save_groups a.jsonl", {}),
        ("serve --env.group_size 8 --env.max_num_workers=2 --env.use_wandb no --max_n_completions 4", {}),
    ],
)
def test_command_lines_in_the_design_document_are_parsed(command, expected):
    name, *arguments = command.split()
    config = cli.parse(Document, name, arguments)
    assert isinstance(config, cli.CommandConfig) and {key: getattr(config, key) for key in expected} == expected
    if "8001" in command:
        (server,) = config.openai
        assert server.base_url == "http://localhost:8001/v1"
    if "total_steps" in command:
        assert (config.env.total_steps, config.env.data_path_to_save_groups) == (3, "a.jsonl")


def test_subclass_may_change_command_line_options():
    class Own(Document):
        @classmethod
        def get_cli_serve_config_cls(cls):
            class Config(super().get_cli_serve_config_cls()):
                max_n_completions: int = 2

            return Config

    assert cli.parse(Own, "serve", []).max_n_completions == 2
    assert cli.parse(Own, "process", []).max_n_completions == 8
    defaults = Document.get_cli_serve_config_cls()()
    assert (defaults.env.wandb_name, defaults.openai) == ("document", ServerBaseline())
    assert Document.get_cli_process_config_cls()().env.include_messages


@pytest.mark.parametrize("command", ["serve", "process", "evaluate"])
def test_help_of_command_lists_its_options_and_defaults(command, capsys):
    class Own(Document):
        @classmethod
        def get_cli_process_config_cls(cls):
            class Config(super().get_cli_process_config_cls()):
                seed_file: str = Field(default="seeds.txt", description="read by process alone")

            return Config

    assert cli.run(Own, [command, "--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"Own {command}: ")
    assert ("--seed_file seeds.txt\n      read by process alone" in printed) == (command == "process")
    assert f"--env.use_wandb {command == 'serve'}\n" in printed
    assert ("--env.data_path_to_save_groups data/document.jsonl\n" in printed) == (command == "process")


def test_help_without_command_lists_commands(capsys):
    assert cli.run(Document, ["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {command} " in printed for command in cli.COMMANDS)
    assert "COMMAND --help lists the options of another command" in printed
    assert cli.run(Document, ["proces", "--help"]) == 2
    assert "no command 'proces'. Commands: serve, process, evaluate. Did you mean 'process'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--port", r"--port needs a value \(port of a model server on this machine"),
        ("--port --slurm", "--port needs a value"),
        ("--port=", "--port: .*integer.*got ''"),
        ("--port true", "--port: .*integer.*'true'"),
        ("--env.group_size", "--env.group_size needs a value"),
        ("--env.worker_timeout", "--env.worker_timeout needs a value"),
        ("--env.wandb_name --env.use_wandb", "--env.wandb_name needs a value"),
        ("--openai.base_url", "--openai.base_url needs a value"),
        ("--max_n_completions", "--max_n_completions needs a value"),
    ],
)
def test_error_for_an_option_without_a_value_names_the_option(arguments, message):
    with pytest.raises(UsageError, match=message):
        cli.parse(Document, "serve", arguments.split())


def test_config_file_with_true_instead_of_a_number_is_refused(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("env: {group_size: true}")
    with pytest.raises(UsageError, match="group_size cannot be True"):
        cli.parse(Document, "serve", ["--config", str(file)])


@pytest.mark.system
def test_help_prints_no_error_if_its_output_pipe_is_closed():
    script = "from tests.design.test_base_env import Document; Document.cli()"
    for command in (["serve", "--help"], ["--help"]):
        assert run_with_closed_pipe([sys.executable, "-c", script, *command]) == (0, "")


def test_local_policy_server_is_found_without_options():
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", 8001))
        except OSError:
            pytest.skip("needs port 8001 of this machine, but another program uses it")
        listener.listen()
        (server,) = resolve_servers(ServerBaseline(), slurm=False)
        assert (server.base_url, server.model_name) == ("http://localhost:8001/v1", "policy")
        assert resolve_servers(ServerBaseline(model_name="mine"), slurm=False)[0].model_name == "mine"
    assert [one.base_url for one in resolve_servers(ServerBaseline(), slurm=False)] == [
        f"http://localhost:{port}/v1" for port in range(9004, 9008)
    ]
