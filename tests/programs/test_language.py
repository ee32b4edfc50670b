"""`rlframe train --agent grpo`: the four services of a language model's run, as processes and as threads."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket

import httpx
import pytest

from rlframe.agents.grpo import GRPO, GRPOConfig
from rlframe.errors import UsageError
from rlframe.language import ModelConfig
from rlframe.language.model import weights
from rlframe.language.server import PolicyServerConfig
from rlframe.programs.experiment import Experiment
from rlframe.programs.options.config_file import load_experiment
from rlframe.programs.options.make_experiment import make_experiment
from rlframe.programs.policies.evaluation import evaluate
from rlframe.programs.run_dir.directory import RunDir
from rlframe.programs.runner import run_experiment
from rlframe.programs.session import Session
from rlframe.programs.topologies import language as topology
from rlframe.programs.topologies.language_nodes import EnvironmentNode, WarmUpNode, api_server_config, next_incarnation
from rlframe.programs.training.language_monitor import LanguageMonitor
from rlframe.trajectories.config import Settings
from rlframe.trajectories.service.app import TrajectoryServer
from rlframe.trajectories.service.previews import load_decode
from tests.programs.running_program import ROOT, RunningProgram, stop_signal
from tests.small_disk import small_disk

__all__ = ["small_disk"]

REVERSE = f"{ROOT / 'examples/llm/reverse.py'}:Reverse"
MODEL = ModelConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
# A model this small answers with noise, whose scores are often all 0: such groups are sent as well.
ENV = {"group_size": 4, "eval_size": 4, "ensure_scores_are_not_same": False}
SMALL = [
    *("--agent", "grpo", "--env", REVERSE, "--preset", "none", "--env-kwargs", json.dumps(ENV)),
    *("--batch-size", "8", "--max-tokens", "16", "--kl-cost", "0", "--slots", "8", "--model.hidden-size", "16"),
    *("--model.intermediate-size", "32", "--model.num-hidden-layers", "1", "--model.num-attention-heads", "2"),
]
SERVICES = ("trajectories", "policy", "environment", "learner", "monitor")


def described(**fields) -> Experiment:
    config = GRPOConfig(model=MODEL, max_tokens=16, batch_size=8, kl_cost=0.0, **fields.pop("agent", {}))
    values = {"slots": 8, "env_kwargs": ENV, "engine": "threads", **fields}
    return make_experiment("grpo", REVERSE, preset="none", agent_config=config, **values)


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.system
def test_all_services_in_one_process_learn_after_a_supervised_warm_up(tmp_path):
    agent = {"supervised_steps": 3, "supervised_batch_size": 4}
    # So many steps that the monitor, which looks ten times a second, evaluates before the last one.
    result = run_experiment(described(agent=agent, steps=40, eval_every=2), run_dir=tmp_path / "run")
    assert result.learner_steps >= 40
    assert result.env_steps == result.learner_steps * 8
    assert set(result.evaluation) == {"eval/exact_match"}
    rows = rows_of(tmp_path / "run")
    steps = [row["step"] for row in rows]
    assert steps == sorted(steps) and steps[-1] == 3 + result.learner_steps
    assert next(row for row in rows if "supervised_loss" in row)["supervised_loss"] > 1.0
    learned = [row for row in rows if "reward" in row]
    assert all(0.0 <= row["reward"] <= 1.0 and row["length"] >= 1.0 and row["staleness"] >= 0.0 for row in learned)
    evaluated = [row["step"] for row in rows if "return_mean" in row]
    assert 3 <= evaluated[0] < evaluated[-1] == 3 + result.learner_steps
    assert weights.read_config(tmp_path / "run" / "warmup") == MODEL
    assert load_experiment(tmp_path / "run").agent_config.supervised_steps == 3


@pytest.mark.system
def test_a_run_goes_on_where_it_was_stopped(tmp_path):
    run_experiment(described(steps=2), run_dir=tmp_path / "run")
    with pytest.raises(UsageError, match="rlframe serve policy --run-dir"):
        evaluate(tmp_path / "run")
    result = run_experiment(described(steps=4), run_dir=tmp_path / "run", resume=True)
    assert result.learner_steps >= 4
    steps = [row["step"] for row in rows_of(tmp_path / "run") if "reward" in row]
    assert steps == sorted(set(steps))


COUNTING = f"""
from rlframe.programs.options.object_names import load_object
Reverse = load_object({REVERSE!r}, "environment")

class Counting(Reverse):
    async def setup(self):
        await super().setup()
        self.asked = 0

    async def get_next_item(self):
        self.asked += 1
        return await super().get_next_item()

    def save_checkpoint(self, step, data=None):
        super().save_checkpoint(step, {{**(data or {{}}), "asked": self.asked}})
"""


@pytest.mark.system
def test_an_environment_of_a_resumed_run_has_its_name_and_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(topology, "ENV_CHECKPOINT_EVERY", 2)
    (tmp_path / "counting.py").write_text(COUNTING)
    env = f"{tmp_path / 'counting.py'}:Counting"
    saved = []
    for steps in (6, 12):
        run_experiment(dataclasses.replace(described(steps=steps), env=env), run_dir=tmp_path / "run", resume=steps > 6)
        (folder,) = (tmp_path / "run" / "env_checkpoints").iterdir()
        newest = max(folder.iterdir(), key=lambda path: int(path.stem.removeprefix("step-")))
        saved.append((folder.name, json.loads(newest.read_text())["asked"]))
    (first, before), (second, after) = saved
    assert first == second == "reverse_0" and after > before >= 6


class NotingEngine:
    """Takes nodes, and starts none."""

    def __init__(self):
        self.nodes = {}

    def add(self, name, node, *args):
        self.nodes[name] = node, args


def test_the_page_of_a_run_has_the_run_s_tokenizer(tmp_path):
    engine, experiment = NotingEngine(), described()
    topology.language(engine, Session(experiment, GRPO(experiment.agent_config), tmp_path, 1, 0.0))
    node, (settings, *_) = engine.nodes["trajectories"]
    assert node is TrajectoryServer and load_decode(settings.tokenizer)([72, 105]) == "Hi"


EXAMINED = f"""
from rlframe.programs.options.object_names import load_object
Reverse = load_object({REVERSE!r}, "environment")

class Examined(Reverse):
    async def evaluate(self, *args, **kwargs):
        await self.evaluate_log({{"eval/right": 0.25, "other": 1.0}})
"""


def test_what_evaluate_log_is_given_is_the_run_s_evaluation(tmp_path):
    (tmp_path / "examined.py").write_text(EXAMINED)
    experiment = dataclasses.replace(described(), env=f"{tmp_path / 'examined.py'}:Examined")
    environment = EnvironmentNode(Session(experiment, GRPO(experiment.agent_config), tmp_path, 1, 0.0), 0)
    asyncio.run(environment._env.evaluate())
    assert environment._metrics.since(0, "eval") == {"eval/right": 0.25, "eval/other": 1.0}


def test_an_environment_that_is_killed_while_it_counts_itself_begins_again(tmp_path, monkeypatch):
    path = tmp_path / "environments" / "0.incarnation"
    assert [next_incarnation(path), next_incarnation(path)] == [0, 1]

    def killed(source, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "replace", killed)
        next_incarnation(path)
    assert next_incarnation(path) == 2


def test_a_warm_up_that_is_told_to_stop_makes_no_further_update(tmp_path):
    config = described(agent={"supervised_steps": 10, "supervised_batch_size": 2}).agent_config
    session = Session(described(), GRPO(config), tmp_path, 1, 0.0)
    node = WarmUpNode(session)
    node.stop()
    node.run()
    assert not (tmp_path / "warmup").exists() and not rows_of(tmp_path)


def test_an_environment_waits_as_long_as_the_policy_server_may_take(tmp_path):
    session = Session(described(), None, tmp_path, 1, 0.0)
    assert api_server_config(session).timeout >= PolicyServerConfig().request_timeout


def test_what_is_wrong_is_said_before_anything_is_started(tmp_path):
    def experiment(env=REVERSE, **fields) -> Experiment:
        return make_experiment("grpo", env, preset="none", **fields)

    path = tmp_path / "run"
    with pytest.raises(UsageError, match="has no option 'group_sise'.*group_size"):
        run_experiment(experiment(env_kwargs={"group_sise": 4}), run_dir=path)
    with pytest.raises(UsageError, match="env_kwargs: the run sets batch_size. Use --batch-size"):
        run_experiment(experiment(env_kwargs={"batch_size": 4}), run_dir=path)
    with pytest.raises(UsageError, match="needs a subclass of rlframe.language.BaseEnv, but"):
        run_experiment(experiment(env=f"{ROOT / 'examples/llm/reverse.py'}:held_out"), run_dir=path)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match="Cannot listen at port"):
        run_experiment(experiment(service_port=taken.getsockname()[1]), run_dir=path)
    with pytest.raises(UsageError, match="The tokenizer byte has 263 tokens, but the model has only 100"):
        config = GRPOConfig(model=ModelConfig(vocab_size=100))
        run_experiment(experiment(agent_config=config), run_dir=path)
    assert not path.exists()


def test_one_command_runs_all_services_as_processes(tmp_path):
    with RunningProgram(tmp_path / "run", *SMALL, "--steps", "5") as program:
        program.wait_until(lambda: set(SERVICES) <= set(program.nodes()))
        code, result = program.finish()
    assert code == 0, program.errors()
    assert result["learner_steps"] >= 5 and result["env_steps"] == 8 * result["learner_steps"]
    assert set(result["evaluation"]) == {"eval/exact_match"}
    last = [row for row in program.rows() if "reward" in row][-1]
    assert last["policy_tokens"] > 0 and "replay_batches" in last and "train/exact_match" in last


@pytest.mark.system
def test_ctrl_c_saves_and_the_run_goes_on_from_there(tmp_path):
    with RunningProgram(tmp_path / "run", *SMALL, "--steps", "100000", "--checkpoint-every", "5") as program:
        program.wait_for_steps(5)
        assert stop_signal(program) < 10.0
        code, result = program.finish()
    assert code == 130, program.errors()
    assert result is not None and result["learner_steps"] >= 5
    with RunningProgram(tmp_path / "run", *SMALL, "--resume", "--steps", str(result["learner_steps"] + 3)) as program:
        code, resumed = program.finish()
    assert code == 0, program.errors()
    assert resumed["learner_steps"] >= result["learner_steps"] + 3
    assert set(resumed["evaluation"]) == {"eval/exact_match"}


@pytest.mark.system
def test_a_run_reaches_its_last_step_whichever_services_are_killed(tmp_path):
    steps = 1_500  # longer than it takes to kill them all
    with RunningProgram(tmp_path / "run", *SMALL, "--steps", str(steps), "--checkpoint-every", "10") as program:
        at = 0
        for name in SERVICES:
            program.wait_for_steps(at + 10)
            program.kill(name)
            at = program.rows()[-1]["step"]
            assert at < steps, "it was over before all services had been killed"
        code, result = program.finish(500.0)
    assert code == 0, program.errors()
    assert result["learner_steps"] >= steps
    for name in SERVICES:
        assert f"[{name}] was killed by SIGKILL: restart 1 of 3" in program.errors()
    # Everything that was acknowledged was learned from, or waits still.
    service = TrajectoryServer(Settings(port=0, store=f"sqlite:{tmp_path / 'run' / 'trajectories.db'}"))
    try:
        report = httpx.get(f"{service.url}/report", timeout=60.0).json()
    finally:
        service.close()
    assert report["groups_added"] == report["groups_served"] + report["status"]["queue_size"]
    assert report["batches_served"] >= result["learner_steps"]


class Services:
    """Of a run, as its monitor sees them: one more update with each look, and a disk that the first evaluation fills.

    Args:
        disk: see `small_disk`; it has room again once the learner has finished.
    """

    def __init__(self, disk) -> None:
        self.disk, self.steps, self.evaluated, self.finished = disk, 0, 0, False

    def stats(self):
        self.steps += not self.finished
        learned = {"learner_steps": self.steps, "params_version": self.steps, "finished": self.finished}
        return {**learned, "version": self.steps, "rank": 0, "metrics": {}}

    def evaluate(self, number):
        if self.evaluated == 0:
            self.disk.fill()
        self.evaluated += 1
        return number, {"eval/exact_match": 0.5}

    def finish(self):
        self.finished = True
        self.disk.free()


def test_a_monitor_outlives_a_full_disk(small_disk, caplog):
    directory = RunDir(small_disk.path / "run")
    directory.create()
    services = Services(small_disk)
    session = Session(described(steps=30, eval_every=5), None, directory.path, 30, 0.0)
    LanguageMonitor(session, services, services, [services]).run()
    assert services.evaluated > 2 and json.loads(directory.progress.read_text())["evaluated"] == services.steps
    assert f"Cannot write {directory.progress}: No space left on device." in caplog.text
