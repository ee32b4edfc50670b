"""In every topology, callbacks receive every row and can end a run. If a callback raises, no progress is lost."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
import types
from typing import Any

import jax
import numpy as np
import pytest

import rlframe
from rlframe.coordinator.journal import Journal
from rlframe.errors import UsageError
from rlframe.learners import Checkpointer
from rlframe.metrics import read_jsonl
from rlframe.metrics.files import rows_after
from rlframe.programs.policies.evaluation import Evaluations
from rlframe.programs.policies.saved import read_checkpoint, read_policy
from rlframe.programs.run_dir.directory import Result, RunDir, open_run
from rlframe.programs.topologies.makers import make_agent
from rlframe.programs.training.loop import TrainingLoop
from tests.extras import needs
from tests.ray_home import ray_home

PLACES = [
    ("single_process", None),
    ("heavy_env", "threads"),
    pytest.param("light_env", "threads", marks=pytest.mark.system),
]
ONLY_SINGLE_PROCESS_IS_FAST = [PLACES[0], pytest.param(*PLACES[1], marks=pytest.mark.system), PLACES[2]]
PROCESSES = [
    ("heavy_env", "local"),
    ("light_env", "local"),
    ("elastic", "local"),
    ("distributed", "launchpad"),
    ("heavy_env", "ray"),
    ("elastic", "ray"),
]
NEVER = 10**8  # steps


@pytest.fixture(autouse=True)
def home(monkeypatch):
    """Set HOME to the directory with the Ray token, because this process reads the token only once."""
    monkeypatch.setenv("HOME", ray_home())


class MyError(Exception):
    """An exception that a callback of a test raises."""


def train(run_dir: pathlib.Path, topology: str, engine: str | None, **options: Any) -> Result:
    if engine in ("launchpad", "ray"):
        needs(engine)
    values = {"steps": NEVER, "num_envs": 4, "env_type": "loop", "network": "mlp", "eval_episodes": 2, "log_every": 100}
    values |= {"unroll_length": 8, "batch_size": 4, "preset": "none", "topology": topology, **options}
    if engine is not None:
        values["engine"] = engine
    return rlframe.train("impala", "CartPole-v1", run_dir=run_dir, quiet=True, **values)


def check_run_continues(run_dir: pathlib.Path, ended_at: int) -> None:
    """Resume the run for 200 more steps, and check that it succeeds."""
    result = rlframe.train(run_dir=run_dir, resume=True, stop_at=ended_at + 200, quiet=True)
    assert result.env_steps >= ended_at + 200 and result.stopped_by == "stop_at"


def check_callback_stops_the_run(run_dir: pathlib.Path, topology: str, engine: str | None) -> None:
    pids, steps = set(), []

    def callback(info):
        pids.add(os.getpid())
        steps.append(info.step)
        if info.step >= 300:
            info.stop()

    result = train(run_dir, topology, engine, callbacks=[callback])
    assert result.stopped_by == "callback" and 300 <= result.env_steps < 100_000
    assert pids == {os.getpid()}  # all callbacks ran in this process
    assert steps == [row["step"] for row in read_jsonl(run_dir / "metrics.jsonl")]
    assert rlframe.load(run_dir).version == result.params_version
    assert rlframe.evaluate(run_dir, episodes=2)["return_mean"] == result.return_mean
    assert Result.read(RunDir(run_dir).result) == result


def check_callback_exception(run_dir: pathlib.Path, topology: str, engine: str | None) -> None:
    expected = MyError("a typo")

    def callback(info):
        if info.step >= 300:
            raise expected

    with pytest.raises(MyError) as caught:
        train(run_dir, topology, engine, callbacks=[callback])
    assert caught.value is expected
    assert caught.traceback[-1].name == "callback"
    written = Result.read(RunDir(run_dir).result)
    assert written.stopped_by == "error" and written.return_mean is None
    assert written.learner_steps == Checkpointer(run_dir / "checkpoints").steps()[-1]  # the last update is saved


@pytest.mark.parametrize(("topology", "engine"), ONLY_SINGLE_PROCESS_IS_FAST)
def test_run_stopped_by_a_callback_saves_and_evaluates_and_can_be_resumed(tmp_path, topology, engine):
    check_callback_stops_the_run(tmp_path / "run", topology, engine)
    check_run_continues(tmp_path / "run", Result.read(RunDir(tmp_path / "run").result).env_steps)


@pytest.mark.parametrize(("topology", "engine"), ONLY_SINGLE_PROCESS_IS_FAST)
def test_callback_exception_is_raised_after_saving_and_the_run_can_be_resumed(tmp_path, topology, engine):
    check_callback_exception(tmp_path / "run", topology, engine)
    check_run_continues(tmp_path / "run", Result.read(RunDir(tmp_path / "run").result).env_steps)


@pytest.mark.system
def test_callback_exception_is_raised_in_the_caller_of_a_program(tmp_path):
    check_callback_exception(tmp_path / "run", "heavy_env", "local")


@pytest.mark.system
@pytest.mark.parametrize(("topology", "engine"), PROCESSES)
def test_callback_can_stop_every_topology_and_engine(tmp_path, topology, engine):
    check_callback_stops_the_run(tmp_path / "run", topology, engine)
    check_run_continues(tmp_path / "run", Result.read(RunDir(tmp_path / "run").result).env_steps)


@pytest.mark.system
@pytest.mark.parametrize(("topology", "engine"), PROCESSES)
def test_callback_exception_is_raised_in_the_caller_in_every_topology_and_engine(tmp_path, topology, engine):
    check_callback_exception(tmp_path / "run", topology, engine)
    check_run_continues(tmp_path / "run", Result.read(RunDir(tmp_path / "run").result).env_steps)


def check_save_and_policy(run_dir: pathlib.Path, topology: str, engine: str | None) -> None:
    policies, last = [], []

    def callback(info):
        if "return_mean" in info.values:
            last.append(info.save())  # the program can have ended
        elif info.values.get("learner_steps", 0) > 0 and len(policies) < 2:
            step = info.save()
            assert step >= info.values["learner_steps"] and step in Checkpointer(run_dir / "checkpoints").steps()
            assert info.policy is info.policy and info.policy.version >= info.values["params_version"]
            assert info.policy.act(np.zeros((3, 4), np.float32)).shape == (3,)
            policies.append(info.policy)
        elif len(policies) == 2:
            info.stop()

    result = train(run_dir, topology, engine, callbacks=[callback], checkpoint_every=0)
    assert policies[0].version < policies[1].version <= result.params_version
    assert last == Checkpointer(run_dir / "checkpoints").steps()[-1:]
    params = rlframe.load(run_dir).params
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves((params, policies[0].params)))
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(policies[0].params)))


@pytest.mark.system
@pytest.mark.parametrize(("topology", "engine"), ONLY_SINGLE_PROCESS_IS_FAST)
def test_callback_can_save_and_use_the_current_policy(tmp_path, topology, engine):
    check_save_and_policy(tmp_path / "run", topology, engine)


@pytest.mark.system
@pytest.mark.parametrize(("topology", "engine"), [*PROCESSES[:3], ("heavy_env", "ray")])
def test_callback_can_save_and_use_the_current_policy_in_every_topology_and_engine(tmp_path, topology, engine):
    check_save_and_policy(tmp_path / "run", topology, engine)


def test_save_is_exact_in_one_process_and_unused_policies_save_nothing(tmp_path):
    checkpoints, threads, saved = Checkpointer(tmp_path / "run/checkpoints"), [], []

    def callback(info):
        if not saved:
            assert checkpoints.steps() == []  # neither earlier rows nor their policies have saved
        if info.step >= 300 and not saved:
            saved.append(info.save())
            assert saved == checkpoints.steps() == [info.values["learner_steps"]]
            assert info.policy.version == info.values["params_version"]
        if info.step >= 500 and not threads:  # another thread saves before the next steps
            threads.append(threading.Thread(target=lambda: saved.append(info.save())))
            threads[0].start()
        if len(saved) == 2:
            info.stop()

    result = train(tmp_path / "run", "single_process", None, callbacks=[callback], checkpoint_every=0, eval_episodes=0)
    assert result.stopped_by == "callback" and saved[0] < saved[1]
    # The oldest checkpoint that is kept contains the environments and the replay, so the run can continue from it.
    oldest, stop_at = checkpoints.steps()[0], result.env_steps + 100
    resumed = rlframe.train(run_dir=tmp_path / "run", resume=True, resume_from=oldest, stop_at=stop_at, quiet=True)
    assert stop_at <= resumed.env_steps < stop_at + 10


def test_stop_at_ends_the_run_after_enough_rows_with_a_high_value(tmp_path):
    stops = []

    def row(**values: float) -> Any:
        return types.SimpleNamespace(values=values, stop=lambda: stops.append(values))

    stop_at = rlframe.StopAt(10.0, "loss", rows=2)
    for values in ({"loss": 11.0}, {"loss": 9.0}, {"loss": 10.0}, {"other": 99.0}, {"loss": 12.0}):
        assert not stops
        stop_at(row(**values))
    assert stops == [{"loss": 12.0}]
    with pytest.raises(UsageError, match="rows must be at least 1, got 0"):
        rlframe.StopAt(1.0, rows=0)
    result = train(tmp_path / "run", "single_process", None, callbacks=[rlframe.StopAt(1.0, "episode_return")])
    assert result.stopped_by == "callback" and result.env_steps < 1_000


@pytest.mark.system
@pytest.mark.parametrize(("topology", "engine"), ONLY_SINGLE_PROCESS_IS_FAST[:2])
def test_evaluate_on_evaluates_in_another_environment_after_each_evaluation(tmp_path, topology, engine):
    shorter = rlframe.EvaluateOn("CartPole-v1", env_kwargs={"max_episode_steps": 5}, episodes=2)
    options = {"callbacks": [shorter], "steps": 400, "eval_every": 200, "log_every": 1_000}
    train(tmp_path / "run", topology, engine, **options)
    steps = [row["step"] for row in read_jsonl(tmp_path / "run/metrics.jsonl") if "return_mean" in row]
    assert [row["step"] for row in shorter.rows] == steps and len(steps) >= 2
    assert {row["return_mean"] for row in shorter.rows} == {5.0}
    assert shorter.rows[0]["params_version"] <= shorter.rows[-1]["params_version"]


@pytest.mark.system
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_run_is_saved_if_a_callback_raises_system_exit(tmp_path, error):
    def callback(info):
        raise error

    with pytest.raises(type(error)) as caught:
        train(tmp_path / "run", "single_process", None, callbacks=[callback])
    assert caught.value is error
    assert Checkpointer(tmp_path / "run/checkpoints").steps()


def test_no_callback_is_called_after_a_callback_has_raised(tmp_path):
    called = []

    def fails(info):
        raise MyError

    with pytest.raises(MyError):
        train(tmp_path / "run", "single_process", None, callbacks=[called.append, fails, called.append])
    assert len(called) == 1


@pytest.mark.system
def test_another_thread_can_call_stop(tmp_path):
    threads = []

    def callback(info):
        if not threads:
            threads.append(threading.Thread(target=info.stop))
            threads[0].start()

    assert train(tmp_path / "run", "heavy_env", "threads", callbacks=[callback]).stopped_by == "callback"


def test_result_is_written_before_the_exception_of_a_callback_is_raised(tmp_path):
    def callback(info):
        if "return_mean" in info.values:
            raise MyError

    with pytest.raises(MyError):
        train(tmp_path / "run", "single_process", None, steps=300, callbacks=[callback])
    written = Result.read(RunDir(tmp_path / "run").result)
    assert written.stopped_by == "error" and written.return_mean is not None


@pytest.mark.system
def test_evaluated_policy_is_saved_before_callbacks_receive_its_row(tmp_path):
    seen = []

    def callback(info):
        if "return_mean" in info.values:
            seen.append((info.values["return_mean"], rlframe.evaluate(tmp_path / "run", episodes=2)["return_mean"]))

    options = {"steps": 600, "eval_every": 200, "checkpoint_every": 0, "log_every": 1_000}
    train(tmp_path / "run", "single_process", None, callbacks=[callback], **options)
    assert len(seen) == 3 and all(logged == of_checkpoint for logged, of_checkpoint in seen)


@pytest.mark.system
def test_evaluated_policy_is_saved_before_callbacks_receive_its_row_in_elastic(tmp_path):
    logged, saved = [], {}

    def callback(info):
        if "return_mean" in info.values and not logged:
            logged.append(info.values["return_mean"])
            directory, experiment = open_run(tmp_path / "run", {})
            agent = make_agent(experiment)
            steps = Checkpointer(directory.checkpoints).steps()  # two, if the next evaluation has started
            for policy in [read_policy(agent, read_checkpoint(directory, step)) for step in steps]:
                saved[policy.version] = Evaluations(experiment, agent, policy).evaluate()["return_mean"]
            info.stop()

    train(tmp_path / "run", "elastic", "local", callbacks=[callback], eval_every=20_000, checkpoint_every=NEVER)
    notes = Journal(tmp_path / "run/coordinator/journal.jsonl").notes
    evaluated = next(note for note in notes if note["kind"] == "evaluated")
    assert saved[evaluated["params_version"]] == logged[0] == evaluated["return_mean"]


def test_stop_after_an_evaluation_does_not_repeat_the_evaluation(tmp_path):
    def callback(info):
        if "return_mean" in info.values:
            info.stop()

    result = train(tmp_path / "run", "single_process", None, eval_every=200, callbacks=[callback])
    rows = [row for row in read_jsonl(tmp_path / "run/metrics.jsonl") if "return_mean" in row]
    assert [row["return_mean"] for row in rows] == [result.return_mean] and result.episodes == 2


def test_invalid_callbacks_are_refused_before_the_run(tmp_path):
    for wrong in (lambda step, values: None, 3):
        with pytest.raises(UsageError, match=r"A callback must take one argument, callback\(info\)"):
            train(tmp_path / "run", "single_process", None, callbacks=[wrong])
    with pytest.raises(UsageError, match="callbacks must be a list of functions"):
        train(tmp_path / "run", "single_process", None, callbacks=print)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", ["single_process", pytest.param("threads", marks=pytest.mark.system)])
def test_failing_tracker_does_not_end_the_run(tmp_path, caplog, place):
    from rlframe.programs import make_experiment, run_experiment

    class Broken:
        def write(self, step, values):
            raise OSError("the tracker is unavailable")

        def close(self):
            pass

    where = {} if place == "single_process" else {"topology": "heavy_env", "engine": "threads"}
    fields = {"steps": 300, "num_envs": 4, "env_type": "loop", "network": "mlp", "eval_episodes": 1, "log_every": 100}
    experiment = make_experiment("impala", preset="none", unroll_length=8, batch_size=4, **fields, **where)
    result = run_experiment(experiment, run_dir=tmp_path / "run", open_trackers=lambda path: [Broken()])
    assert result.return_mean is not None
    warnings = [each.getMessage() for each in caplog.records if "the tracker is unavailable" in each.getMessage()]
    assert warnings == ["A row of the logs is lost: OSError: the tracker is unavailable"]


@pytest.mark.system
def test_signal_is_reported_as_an_interrupt(tmp_path):
    for place in PLACES[:2]:
        steps = []

        def callback(info, steps=steps):
            if not steps:  # only one signal, because a second one ends the run at once
                steps.append(info.step)
                os.kill(os.getpid(), signal.SIGINT)

        result = train(tmp_path / place[0], *place, callbacks=[callback])
        assert (result.stopped_by, result.signal, result.return_mean) == ("interrupt", signal.SIGINT, None)


def test_no_evaluation_starts_after_a_signal(tmp_path, monkeypatch):
    def callback(info):
        if info.step < 100:
            return
        monkeypatch.setattr(TrainingLoop, "_evaluate", lambda *_, **__: pytest.fail("an evaluation started"))
        os.kill(os.getpid(), signal.SIGINT)

    result = train(tmp_path / "run", "single_process", None, callbacks=[callback], eval_every=50, log_every=50)
    assert result.signal == signal.SIGINT


def test_reader_of_logs_never_returns_a_part_of_a_row(tmp_path):
    """After a restarted monitor has replaced the last rows, the position of a reader can be inside a row."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    (_, first), (_, second) = rows_after(path, 0)
    path.write_text('{"step": 1}\n{"step": 2, "loss": 0.5}\n{"step": 3}\n{"step"')
    assert [row for row, _ in rows_after(path, second)] == [{"step": 2, "loss": 0.5}, {"step": 3}]
    assert [row["step"] for row, _ in rows_after(path, first)] == [2, 3]
    assert [row["step"] for row, _ in rows_after(path, 0)] == [1, 2, 3]
