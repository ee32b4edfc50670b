"""The monitor and a real learner in one process. Most tests check evaluations during which a node dies."""

from __future__ import annotations

import contextlib
import pathlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.extras import needs
from tests.waiting import wait_until

needs("launchpad")
import courier

from rlframe.actors import Actor
from rlframe.agents.networks import MLPConfig
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.learners import Checkpointer, Learner, LearnerConfig
from rlframe.metrics import read_jsonl
from rlframe.programs import evaluate, make_experiment
from rlframe.programs.run_dir.directory import ProgressFile, Result, RunDir
from rlframe.programs.session import Session
from rlframe.programs.topologies.makers import make_agent, make_pool
from rlframe.programs.training.game_monitor import GameMonitor
from rlframe.replay import ReplayBuffer

# The environment of evaluations waits until the file `gate` exists.
ENV = """
import pathlib
import time

import gymnasium

def make_env(gate=None):
    deadline = time.monotonic() + 240.0
    if gate is not None:
        pathlib.Path(gate).with_name("reached").touch()
    while gate is not None and not pathlib.Path(gate).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return gymnasium.make("CartPole-v1")
"""


def make_session(tmp_path: pathlib.Path, **fields: Any) -> Session:
    (tmp_path / "env.py").write_text(ENV)
    values = {"network": "mlp", "network_config": MLPConfig((16,)), "env_type": "loop", "num_envs": 2, **fields}
    values |= {"eval_episodes": 2, "eval_env_kwargs": {"gate": str(tmp_path / "gate")}, "topology": "heavy_env"}
    values |= {"min_replay_size": 20, "batch_size": 4, "update_period": 1}
    experiment = make_experiment("dqn", f"{tmp_path}/env.py:make_env", engine="threads", **values)
    directory = RunDir(tmp_path / "run")
    directory.create()
    directory.write_config(experiment, {})
    return Session(experiment, make_agent(experiment), directory.path, until=experiment.steps, began=time.time())


class LearnerAndActor:
    """A learner and an actor that run in threads until the context ends."""

    def __init__(self, session: Session) -> None:
        buffer = ReplayBuffer(session.agent)
        cfg = LearnerConfig(checkpoint_dir=str(RunDir(session.path).checkpoints), resume=True)
        self.learner = Learner(cfg, session.agent, buffer)
        inferencer = Inferencer(InferencerConfig(), session.agent, self.learner)
        self.actor = Actor(lambda seed: make_pool(session.experiment, 2, {}, seed), inferencer, buffer)
        self._threads = [threading.Thread(target=node.run, daemon=True) for node in (self.learner, self.actor)]

    def __enter__(self) -> LearnerAndActor:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for node in (self.actor, self.learner):
            node.stop()
        for thread in self._threads:
            thread.join(120.0)
            assert not thread.is_alive()
        self.actor.close()
        self.learner.close()


class ReplaceableLearner:
    """A proxy of a learner. A test can replace the learner, like a restart does."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    def __getattr__(self, method: str) -> Any:
        return getattr(self.learner, method)


class StoppedActor:
    """A fake actor that reports `env_steps` steps, and makes no more steps."""

    def __init__(self, env_steps: int) -> None:
        self._env_steps = env_steps

    def allow(self, incarnation: int, env_steps: float) -> dict[str, float]:
        counts = {"env_steps": self._env_steps, "episodes": 0, "return_sum": 0.0, "length_sum": 0.0}
        return {"rank": 0, "incarnation": 0, **counts}


@contextlib.contextmanager
def running(monitor: GameMonitor) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=monitor.run, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        monitor.stop()
        thread.join(120.0)
        assert not thread.is_alive()


@pytest.mark.system
@pytest.mark.parametrize("learns_on", [False, True])
def test_last_saved_policy_is_evaluated_if_the_learner_dies_during_evaluation(tmp_path, learns_on):
    session = make_session(tmp_path, steps=200)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(LearnerAndActor(session))
        wait_until(lambda: first.learner.learner_steps > 0)
        reference = ReplaceableLearner(first.learner)
        monitor = stack.enter_context(running(GameMonitor(session, reference, [StoppedActor(200)])))
        wait_until((tmp_path / "reached").exists)
        at = first.learner.learner_steps
        again = LearnerAndActor(session)  # restart from the checkpoint, as after a crash
        assert again.learner.learner_steps == at
        if not learns_on:
            reference.learner = again.learner
            wait_until(lambda: again.learner._finish.is_set())  # the monitor requests it to finish
        stack.enter_context(again)
        if learns_on:
            wait_until(lambda: again.learner.learner_steps > at)
            reference.learner = again.learner
        wait_until(lambda: again.learner.stats()["finished"])
        (tmp_path / "gate").touch()
        monitor.join(120.0)
        result, steps = Result.read(RunDir(session.path).result), again.learner.learner_steps
    assert result.learner_steps == steps == Checkpointer(RunDir(session.path).checkpoints).steps()[-1]
    assert (steps > at) == learns_on
    saved = evaluate(session.path, episodes=2)
    assert (result.return_mean, result.return_std) == (saved["return_mean"], saved["return_std"])
    rows = [row for row in read_jsonl(RunDir(session.path).metrics) if "return_mean" in row]
    assert [row["step"] for row in rows] == [200]


@pytest.mark.system
def test_warning_is_logged_if_the_learner_made_too_few_updates(tmp_path, caplog):
    session = make_session(tmp_path, steps=100_000)
    (tmp_path / "gate").touch()
    with LearnerAndActor(session) as node:
        wait_until(lambda: node.learner.learner_steps > 0)
        with running(GameMonitor(session, node.learner, [StoppedActor(100_000)])) as monitor:
            monitor.join(120.0)
    made = Result.read(RunDir(session.path).result).learner_steps
    assert 0 < made < 50_000  # fewer updates than steps
    assert (
        f"The learner made {made} updates, but about 99980 were expected for 100000 environment steps. The learner was"
        in caplog.text
    )


def test_restarted_monitor_repeats_an_interrupted_evaluation(tmp_path):
    session = make_session(tmp_path, steps=100_000, eval_every=300)
    with LearnerAndActor(session) as node:
        with running(GameMonitor(session, node.learner, [StoppedActor(350)])):
            wait_until((tmp_path / "reached").exists)
        assert evaluated_at(session) == []  # the monitor stopped during its evaluation
        (tmp_path / "gate").touch()
        with running(GameMonitor(session, node.learner, [StoppedActor(350)])):
            wait_until(lambda: evaluated_at(session))
    assert evaluated_at(session) == [350]
    assert (
        ProgressFile(RunDir(session.path).progress, session.session_id).evaluated == 350
    )  # so the next evaluation is due at step 600


def test_restarted_monitor_writes_no_learner_stats_before_the_learner_answers(tmp_path):
    """Version 0 must not appear in the logs after higher versions."""
    session = make_session(tmp_path, steps=100_000, log_every=100)
    path = RunDir(session.path).metrics
    with socket.socket() as silent:
        silent.bind(("localhost", 0))  # nothing answers at this port
        learner = courier.Client(f"localhost:{silent.getsockname()[1]}")
        with running(GameMonitor(session, learner, [StoppedActor(350)])):
            wait_until(lambda: path.exists() and read_jsonl(path))
    (row, *_) = read_jsonl(path)
    assert row["step"] == 350 and "params_version" not in row and "learner_steps" not in row


def evaluated_at(session: Session) -> list[int]:
    path = RunDir(session.path).metrics
    return [row["step"] for row in read_jsonl(path) if "return_mean" in row] if path.exists() else []


class LimitedActor(StoppedActor):
    """A fake actor that makes steps up to its limit. It reports its steps one call later."""

    def __init__(self) -> None:
        super().__init__(0)
        self.limits: list[float] = []

    def allow(self, incarnation: int, env_steps: float) -> dict[str, float]:
        stats = super().allow(incarnation, env_steps)
        if incarnation == 0:
            self.limits.append(env_steps)
            self._env_steps = max(self._env_steps, min(int(env_steps), self._env_steps + 30))
        return {**stats, "rank": 0}


@pytest.mark.system
def test_run_has_exactly_its_number_of_steps_if_one_actor_makes_no_steps(tmp_path):
    session = make_session(tmp_path, steps=200)
    (tmp_path / "gate").touch()
    quick, silent = LimitedActor(), StoppedActor(20)
    silent.allow = lambda *_: {**StoppedActor(20).allow(0, 0), "rank": 1}  # this actor answers, but makes no steps
    with LearnerAndActor(session) as node, running(GameMonitor(session, node.learner, [quick, silent])):
        wait_until(lambda: RunDir(session.path).result.exists())
    assert Result.read(RunDir(session.path).result).env_steps == 200  # 180 steps of `quick` plus 20 steps of `silent`
    assert quick.limits[0] == 90 and max(quick.limits) == 180
