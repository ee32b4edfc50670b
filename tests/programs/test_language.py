"""Runs of `rlframe train --agent grpo`. The services of the run are processes or threads."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket

import httpx
import jax
import numpy as np
import pytest

from rlframe.agents.grpo import GRPO, GRPOConfig
from rlframe.errors import UsageError
from rlframe.language import ModelConfig
from rlframe.language.model import weights
from rlframe.language.server import PolicyServerConfig
from rlframe.learners import Checkpointer
from rlframe.learners.update import InitialState
from rlframe.programs.experiment import Experiment
from rlframe.programs.options.make_experiment import make_experiment
from rlframe.programs.options.saved_experiment import load_experiment
from rlframe.programs.policies.evaluation import evaluate
from rlframe.programs.policies.saved import read_source
from rlframe.programs.run_dir.directory import RunDir
from rlframe.programs.runner import run_experiment
from rlframe.programs.session import Session
from rlframe.programs.topologies import language as topology
from rlframe.programs.topologies.language_nodes import EnvironmentNode, WarmUpNode, api_server_config, next_incarnation
from rlframe.programs.topologies.makers import make_agent
from rlframe.programs.training.language_monitor import LanguageMonitor
from rlframe.trajectories.config import Settings
from rlframe.trajectories.service.app import TrajectoryServer
from rlframe.trajectories.service.models import load_decode
from tests.programs.running_program import ROOT, RunningProgram, stop_signal
from tests.small_disk import small_disk

__all__ = ["small_disk"]

REVERSE = f"{ROOT / 'examples/llm/reverse.py'}:Reverse"
MODEL = ModelConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
# The small model gives random answers, so all scores of a group are often 0. Do not discard such groups.
ENV = {"group_size": 4, "eval_size": 4, "ensure_scores_are_not_same": False}
SMALL = [
    *("--agent", "grpo", "--env", REVERSE, "--preset", "none", "--env-kwargs", json.dumps(ENV)),
    *("--batch-size", "8", "--max-tokens", "16", "--kl-cost", "0", "--slots", "8", "--model.hidden-size", "16"),
    *("--model.intermediate-size", "32", "--model.num-hidden-layers", "1", "--model.num-attention-heads", "2"),
]
SERVICES = ("trajectories", "policy", "environment", "learner", "monitor")


def grpo_experiment(**fields) -> Experiment:
    config = GRPOConfig(model=MODEL, max_tokens=16, batch_size=8, kl_cost=0.0, **fields.pop("agent", {}))
    values = {"slots": 8, "env_kwargs": ENV, "engine": "threads", **fields}
    return make_experiment("grpo", REVERSE, preset="none", agent_config=config, **values)


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.system
def test_services_in_one_process_learn_after_supervised_warm_up(tmp_path):
    agent = {"supervised_steps": 3, "supervised_batch_size": 4}
    # The monitor polls ten times a second, so a shorter run could end before its first evaluation.
    experiment, seen = grpo_experiment(agent=agent, steps=40, eval_every=2), []
    result = run_experiment(experiment, run_dir=tmp_path / "run", callbacks=[lambda info: seen.append(info.step)])
    assert result.learner_steps >= 40
    assert result.env_steps == result.learner_steps * 8
    assert set(result.evaluation) == {"eval/exact_match"}
    rows = rows_of(tmp_path / "run")
    steps = [row["step"] for row in rows]
    assert steps == sorted(steps) and steps[-1] == 3 + result.learner_steps
    assert seen == steps  # callbacks get the rows of the warm-up and those after it
    assert next(row for row in rows if "supervised_loss" in row)["supervised_loss"] > 1.0
    learned = [row for row in rows if "reward" in row]
    assert all(0.0 <= row["reward"] <= 1.0 and row["length"] >= 1.0 and row["staleness"] >= 0.0 for row in learned)
    evaluated = [row["step"] for row in rows if "return_mean" in row]
    assert 3 <= evaluated[0] < evaluated[-1] == 3 + result.learner_steps
    assert weights.read_config(tmp_path / "run" / "warmup") == MODEL
    assert load_experiment(tmp_path / "run").agent_config.supervised_steps == 3


@pytest.mark.system
def test_resumed_run_continues_from_its_checkpoint(tmp_path):
    run_experiment(grpo_experiment(steps=2), run_dir=tmp_path / "run")
    with pytest.raises(UsageError, match="rlframe serve policy --run-dir"):
        evaluate(tmp_path / "run")
    result = run_experiment(grpo_experiment(steps=4), run_dir=tmp_path / "run", resume=True)
    assert result.learner_steps >= 4
    steps = [row["step"] for row in rows_of(tmp_path / "run") if "reward" in row]
    assert steps == sorted(set(steps))


def save_source(directory: RunDir) -> None:
    """Write the config and a checkpoint of a run."""
    experiment = grpo_experiment(seed=3)
    directory.create()
    directory.write_config(experiment, {})
    checkpointer = Checkpointer(directory.checkpoints)
    tree = jax.tree.map(np.asarray, InitialState(make_agent(experiment)).make(seed=3)[:2])
    checkpointer.save(7, tree, {"counters": {"learner_steps": 7, "version": 8}, "codec": None, "extras": None})
    checkpointer.close()


def test_supervised_steps_are_refused_if_the_run_starts_from_another_run(tmp_path):
    with pytest.raises(UsageError, match="init_from starts from a trained model.*Set supervised_steps=0"):
        grpo_experiment(agent={"supervised_steps": 3, "supervised_batch_size": 4}, init_from=str(tmp_path))


@pytest.mark.system
def test_run_starts_from_the_model_of_another_run(tmp_path):
    source, run_dir = tmp_path / "source", tmp_path / "run"
    save_source(RunDir(source))
    result = run_experiment(grpo_experiment(steps=1, init_from=str(source)), run_dir=run_dir)
    assert result.learner_steps >= 1
    of_source, of_run = read_source(str(source), {}), read_source(f"{run_dir}@0", {})
    for ours, theirs in zip(jax.tree.leaves(of_run.params), jax.tree.leaves(of_source.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    after = jax.tree.leaves(read_source(str(run_dir), {}).params)
    largest = max(np.abs(a - b).max() for a, b in zip(after, jax.tree.leaves(of_source.params)))
    assert largest < 0.01  # one small update


COUNTING = f"""
from rlframe.programs.options.object_names import load_object
Reverse = load_object({REVERSE!r}, "environment")

class Counting(Reverse):
    async def setup(self):
        await super().setup()
        self.num_items = 0

    async def get_next_item(self):
        self.num_items += 1
        return await super().get_next_item()

    def save_checkpoint(self, step, data=None):
        super().save_checkpoint(step, {{**(data or {{}}), "num_items": self.num_items}})
"""


@pytest.mark.system
def test_resumed_run_keeps_the_name_and_checkpoint_of_its_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(topology, "ENV_CHECKPOINT_EVERY", 2)
    (tmp_path / "counting.py").write_text(COUNTING)
    env = f"{tmp_path / 'counting.py'}:Counting"
    saved = []
    for steps in (6, 12):
        run_experiment(
            dataclasses.replace(grpo_experiment(steps=steps), env=env), run_dir=tmp_path / "run", resume=steps > 6
        )
        (folder,) = (tmp_path / "run" / "env_checkpoints").iterdir()
        newest = max(folder.iterdir(), key=lambda path: int(path.stem.removeprefix("step-")))
        saved.append((folder.name, json.loads(newest.read_text())["num_items"]))
    (first, before), (second, after) = saved
    assert first == second == "reverse_0" and after > before >= 6


class RecordingEngine:
    """An engine that records nodes without starting them."""

    def __init__(self):
        self.nodes = {}

    def add(self, name, node, *args):
        self.nodes[name] = node, args


def test_live_page_uses_the_tokenizer_of_the_run(tmp_path):
    engine, experiment = RecordingEngine(), grpo_experiment()
    topology.language(engine, Session(experiment, GRPO(experiment.agent_config), tmp_path, 1, 0.0))
    node, (settings, *_) = engine.nodes["trajectories"]
    assert node is TrajectoryServer and load_decode(settings.tokenizer)([72, 105]) == "Hi"


EVALUATED = f"""
from rlframe.programs.options.object_names import load_object
Reverse = load_object({REVERSE!r}, "environment")

class Evaluated(Reverse):
    async def evaluate(self, *args, **kwargs):
        await self.evaluate_log({{"eval/right": 0.25, "other": 1.0}})
"""


def test_result_contains_values_that_the_evaluate_method_logged(tmp_path):
    (tmp_path / "evaluated.py").write_text(EVALUATED)
    experiment = dataclasses.replace(grpo_experiment(), env=f"{tmp_path / 'evaluated.py'}:Evaluated")
    environment = EnvironmentNode(Session(experiment, GRPO(experiment.agent_config), tmp_path, 1, 0.0), 0)
    asyncio.run(environment._env.evaluate())
    assert environment._metrics.since(0, "eval") == {"eval/right": 0.25, "eval/other": 1.0}


def test_interrupted_write_does_not_change_the_incarnation(tmp_path, monkeypatch):
    path = tmp_path / "environments" / "0.incarnation"
    assert [next_incarnation(path), next_incarnation(path)] == [0, 1]

    def interrupted_replace(source, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "replace", interrupted_replace)
        next_incarnation(path)
    assert next_incarnation(path) == 2


def test_stopped_warm_up_makes_no_update(tmp_path):
    config = grpo_experiment(agent={"supervised_steps": 10, "supervised_batch_size": 2}).agent_config
    session = Session(grpo_experiment(), GRPO(config), tmp_path, 1, 0.0)
    node = WarmUpNode(session)
    node.stop()
    node.run()
    assert not (tmp_path / "warmup").exists() and not rows_of(tmp_path)


def test_timeout_of_an_environment_is_at_least_the_timeout_of_the_policy_server(tmp_path):
    session = Session(grpo_experiment(), None, tmp_path, 1, 0.0)
    assert api_server_config(session).timeout >= PolicyServerConfig().request_timeout


def test_invalid_options_are_refused_before_processes_start(tmp_path):
    def experiment(env=REVERSE, **fields) -> Experiment:
        return make_experiment("grpo", env, preset="none", **fields)

    path = tmp_path / "run"
    with pytest.raises(UsageError, match="has no option 'group_sise'.*group_size"):
        run_experiment(experiment(env_kwargs={"group_sise": 4}), run_dir=path)
    with pytest.raises(UsageError, match="env_kwargs: the run sets batch_size. Use --batch-size"):
        run_experiment(experiment(env_kwargs={"batch_size": 4}), run_dir=path)
    with pytest.raises(UsageError, match="needs a subclass of rlframe.language.BaseEnv, but"):
        run_experiment(experiment(env=f"{ROOT / 'examples/llm/reverse.py'}:held_out"), run_dir=path)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match="at service_port="):
        run_experiment(experiment(service_port=taken.getsockname()[1]), run_dir=path)
    with pytest.raises(UsageError, match="The tokenizer byte has 263 tokens, but the model has only 100"):
        config = GRPOConfig(model=ModelConfig(vocab_size=100))
        run_experiment(experiment(agent_config=config), run_dir=path)
    assert not path.exists()


@pytest.mark.system
def test_train_command_runs_all_services_as_processes(tmp_path):
    with RunningProgram(tmp_path / "run", *SMALL, "--steps", "5") as program:
        program.wait_until(lambda: set(SERVICES) <= set(program.nodes()))
        code, result = program.finish()
    assert code == 0, program.errors()
    assert result["learner_steps"] >= 5 and result["env_steps"] == 8 * result["learner_steps"]
    assert set(result["evaluation"]) == {"eval/exact_match"}
    last = [row for row in program.rows() if "reward" in row][-1]
    assert last["policy_tokens"] > 0 and "replay_batches" in last and "train/exact_match" in last


@pytest.mark.system
def test_ctrl_c_saves_the_run_and_resume_continues_it(tmp_path):
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
def test_run_reaches_its_last_step_although_each_service_is_killed(tmp_path):
    steps = 1_500  # many steps, so that the run does not end before all services were killed
    with RunningProgram(tmp_path / "run", *SMALL, "--steps", str(steps), "--checkpoint-every", "10") as program:
        at = 0
        for name in SERVICES:
            program.wait_for_steps(at + 10)
            program.kill(name)
            at = program.rows()[-1]["step"]
            assert at < steps, "the run ended before all services were killed"
        code, result = program.finish(500.0)
    assert code == 0, program.errors()
    assert result["learner_steps"] >= steps
    for name in SERVICES:
        assert f"[{name}] was killed by SIGKILL: restart 1 of 3" in program.errors()
    # No group is lost: the learner has received it, or it is still in the queue.
    service = TrajectoryServer(Settings(port=0, store=f"sqlite:{tmp_path / 'run' / 'trajectories.db'}"))
    try:
        report = httpx.get(f"{service.url}/report", timeout=60.0).json()
    finally:
        service.close()
    assert report["groups_added"] == report["groups_served"] + report["status"]["queue_size"]
    assert report["batches_served"] >= result["learner_steps"]


class FakeServices:
    """A fake learner, policy server and environment in one object. Each call of `stats` counts one update.

    Args:
        disk: The fixture `small_disk`. The first evaluation fills the disk, and `finish` frees it.
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


def test_monitor_survives_a_full_disk(small_disk, caplog):
    directory = RunDir(small_disk.path / "run")
    directory.create()
    services = FakeServices(small_disk)
    session = Session(grpo_experiment(steps=30, eval_every=5), None, directory.path, 30, 0.0)
    LanguageMonitor(session, services, services, [services]).run()
    assert services.evaluated > 2 and json.loads(directory.progress.read_text())["evaluated"] == services.steps
    assert f"Cannot write {directory.progress}: No space left on device." in caplog.text


def test_shard_params_needs_several_devices():
    with pytest.raises(
        UsageError, match="shard_params divides the parameters between devices: set learner_devices to 2"
    ):
        grpo_experiment(shard_params=True)
    assert grpo_experiment(shard_params=True, learner_devices=2).topology_config.shard_params
