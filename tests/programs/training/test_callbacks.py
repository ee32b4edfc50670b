"""Callbacks: they see every row, may end a run, and lose nothing when they raise. The same in every topology."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
from typing import Any

import pytest

import rlframe
from rlframe.coordinator.journal import Journal
from rlframe.errors import UsageError
from rlframe.learners import Checkpointer
from rlframe.metrics import read_jsonl
from rlframe.metrics.files import rows_after
from rlframe.programs.policies.evaluation import Evaluations
from rlframe.programs.policies.saved import read_policy
from rlframe.programs.run_dir.directory import Result, RunDir, open_run
from rlframe.programs.topologies.makers import make_agent
from tests.extras import needs
from tests.ray_home import ray_home

PLACES = [
    ("single_process", None),
    ("heavy_env", "threads"),
    pytest.param("light_env", "threads", marks=pytest.mark.system),
]
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
    """Where Ray keeps its token: the one that this process may have read already."""
    monkeypatch.setenv("HOME", ray_home())


class MyError(Exception):
    """An exception that only this file knows."""


def train(run_dir: pathlib.Path, topology: str, engine: str | None, **options: Any) -> Result:
    if engine in ("launchpad", "ray"):
        needs(engine)
    values = {"steps": NEVER, "num_envs": 4, "env_type": "loop", "network": "mlp", "eval_episodes": 2, "log_every": 100}
    values |= {"unroll_length": 8, "batch_size": 4, "preset": "none", "topology": topology, **options}
    if engine is not None:
        values["engine"] = engine
    return rlframe.train("impala", "CartPole-v1", run_dir=run_dir, quiet=True, **values)


def goes_on(run_dir: pathlib.Path, ended_at: int) -> None:
    """A session that resumes the run takes more steps, and ends by itself."""
    result = rlframe.train(run_dir=run_dir, resume=True, stop_at=ended_at + 200, quiet=True)
    assert result.env_steps >= ended_at + 200 and result.stopped_by == "stop_at"


def stops(run_dir: pathlib.Path, topology: str, engine: str | None) -> None:
    pids, steps = set(), []

    def callback(info):
        pids.add(os.getpid())
        steps.append(info.step)
        if info.step >= 300:
            info.stop()

    result = train(run_dir, topology, engine, callbacks=[callback])
    assert result.stopped_by == "callback" and 300 <= result.env_steps < 100_000
    assert pids == {os.getpid()}  # a closure of the caller is called in the caller's process
    assert steps == [row["step"] for row in read_jsonl(run_dir / "metrics.jsonl")]
    assert rlframe.load(run_dir).version == result.params_version
    assert rlframe.evaluate(run_dir, episodes=2)["return_mean"] == result.return_mean
    assert Result.read(RunDir(run_dir).result) == result


def raises(run_dir: pathlib.Path, topology: str, engine: str | None) -> None:
    mine = MyError("a typo, say")

    def callback(info):
        if info.step >= 300:
            raise mine

    with pytest.raises(MyError) as caught:
        train(run_dir, topology, engine, callbacks=[callback])
    assert caught.value is mine
    assert caught.traceback[-1].name == "callback"
    written = Result.read(RunDir(run_dir).result)
    assert written.stopped_by == "error" and written.return_mean is None
    assert written.learner_steps == Checkpointer(run_dir / "checkpoints").steps()[-1]  # all of it is saved


@pytest.mark.parametrize(("topology", "engine"), PLACES)
def test_stop_ends_a_run_early_with_all_saved_and_evaluated_and_it_can_go_on(tmp_path, topology, engine):
    stops(tmp_path / "run", topology, engine)
    goes_on(tmp_path / "run", Result.read(RunDir(tmp_path / "run").result).env_steps)


@pytest.mark.parametrize(
    ("topology", "engine"), [PLACES[0], pytest.param(*PLACES[1], marks=pytest.mark.system), PLACES[2]]
)
def test_what_a_callback_raises_is_raised_once_all_is_saved_and_the_run_can_go_on(tmp_path, topology, engine):
    raises(tmp_path / "run", topology, engine)
    goes_on(tmp_path / "run", Result.read(RunDir(tmp_path / "run").result).env_steps)


@pytest.mark.system
def test_a_callback_of_a_program_of_processes_raises_in_the_caller(tmp_path):
    raises(tmp_path / "run", "heavy_env", "local")


@pytest.mark.system
@pytest.mark.parametrize(("topology", "engine"), PROCESSES)
def test_a_callback_stops_every_topology_and_engine(tmp_path, topology, engine):
    stops(tmp_path / "run", topology, engine)
    goes_on(tmp_path / "run", Result.read(RunDir(tmp_path / "run").result).env_steps)


@pytest.mark.system
@pytest.mark.parametrize(("topology", "engine"), PROCESSES)
def test_a_callback_raises_from_every_topology_and_engine(tmp_path, topology, engine):
    raises(tmp_path / "run", topology, engine)
    goes_on(tmp_path / "run", Result.read(RunDir(tmp_path / "run").result).env_steps)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_an_exit_within_a_callback_saves_and_leaves(tmp_path, error):
    def callback(info):
        raise error

    with pytest.raises(type(error)) as caught:
        train(tmp_path / "run", "single_process", None, callbacks=[callback])
    assert caught.value is error
    assert Checkpointer(tmp_path / "run/checkpoints").steps()


def test_no_callback_is_called_after_one_has_raised(tmp_path):
    called = []

    def fails(info):
        raise MyError

    with pytest.raises(MyError):
        train(tmp_path / "run", "single_process", None, callbacks=[called.append, fails, called.append])
    assert len(called) == 1


def test_stop_may_be_called_later_from_another_thread(tmp_path):
    threads = []

    def callback(info):
        if not threads:
            threads.append(threading.Thread(target=info.stop))
            threads[0].start()

    assert train(tmp_path / "run", "heavy_env", "threads", callbacks=[callback]).stopped_by == "callback"


def test_what_is_raised_with_the_last_evaluation_comes_after_the_result_is_written(tmp_path):
    def callback(info):
        if "return_mean" in info.values:
            raise MyError

    with pytest.raises(MyError):
        train(tmp_path / "run", "single_process", None, steps=300, callbacks=[callback])
    written = Result.read(RunDir(tmp_path / "run").result)
    assert written.stopped_by == "error" and written.return_mean is not None


def test_a_row_with_an_evaluation_comes_after_the_checkpoint_of_the_evaluated_policy(tmp_path):
    seen = []

    def callback(info):
        if "return_mean" in info.values:
            seen.append((info.values["return_mean"], rlframe.evaluate(tmp_path / "run", episodes=2)["return_mean"]))

    options = {"steps": 600, "eval_every": 200, "checkpoint_every": 0, "log_every": 1_000}
    train(tmp_path / "run", "single_process", None, callbacks=[callback], **options)
    assert len(seen) == 3 and all(logged == of_checkpoint for logged, of_checkpoint in seen)


@pytest.mark.system
def test_in_elastic_a_callback_finds_the_evaluated_policy_in_a_checkpoint(tmp_path):
    logged, saved = [], {}

    def callback(info):
        if "return_mean" in info.values and not logged:
            logged.append(info.values["return_mean"])
            directory, experiment = open_run(tmp_path / "run", {})
            agent = make_agent(experiment)
            steps = Checkpointer(directory.checkpoints).steps()  # two, if the next evaluation has begun
            for policy in [read_policy(agent, directory, step) for step in steps]:
                saved[policy.version] = Evaluations(experiment, agent, policy).evaluate()["return_mean"]
            info.stop()

    train(tmp_path / "run", "elastic", "local", callbacks=[callback], eval_every=20_000, checkpoint_every=NEVER)
    notes = Journal(tmp_path / "run/coordinator/journal.jsonl").notes
    evaluated = next(note for note in notes if note["kind"] == "evaluated")
    assert saved[evaluated["params_version"]] == logged[0] == evaluated["return_mean"]


def test_a_run_that_stops_with_an_evaluation_does_not_repeat_it(tmp_path):
    def callback(info):
        if "return_mean" in info.values:
            info.stop()

    result = train(tmp_path / "run", "single_process", None, eval_every=200, callbacks=[callback])
    rows = [row for row in read_jsonl(tmp_path / "run/metrics.jsonl") if "return_mean" in row]
    assert [row["return_mean"] for row in rows] == [result.return_mean] and result.episodes == 2


def test_a_function_that_takes_no_info_is_refused_before_the_run(tmp_path):
    for wrong in (lambda step, values: None, 3):
        with pytest.raises(UsageError, match=r"A callback must take one argument, callback\(info\)"):
            train(tmp_path / "run", "single_process", None, callbacks=[wrong])
    with pytest.raises(UsageError, match="callbacks must be a list of functions"):
        train(tmp_path / "run", "single_process", None, callbacks=print)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", ["single_process", "threads"])
def test_a_tracker_that_fails_does_not_end_a_run(tmp_path, caplog, place):
    from rlframe.programs import make_experiment, run_experiment

    class Broken:
        def write(self, step, values):
            raise OSError("the tracker is away")

        def close(self):
            pass

    where = {} if place == "single_process" else {"topology": "heavy_env", "engine": "threads"}
    fields = {"steps": 300, "num_envs": 4, "env_type": "loop", "network": "mlp", "eval_episodes": 1, "log_every": 100}
    described = make_experiment("impala", preset="none", unroll_length=8, batch_size=4, **fields, **where)
    result = run_experiment(described, run_dir=tmp_path / "run", open_loggers=lambda path: [Broken()])
    assert result.return_mean is not None
    said = [record.getMessage() for record in caplog.records if "the tracker is away" in record.getMessage()]
    assert said == ["A row of the logs is lost: OSError: the tracker is away"]


def test_a_signal_is_an_interrupt(tmp_path):
    for place in PLACES[:2]:
        told = []

        def callback(info, told=told):
            if not told:  # a second signal leaves at once
                told.append(info.step)
                os.kill(os.getpid(), signal.SIGINT)

        result = train(tmp_path / place[0], *place, callbacks=[callback])
        assert (result.stopped_by, result.signal, result.return_mean) == ("interrupt", signal.SIGINT, None)


def test_rows_that_replace_others_are_read_from_their_start(tmp_path):
    """A restarted monitor takes back its last rows: a reader's position may then be inside a new one."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    (_, first), (_, second) = rows_after(path, 0)
    path.write_text('{"step": 1}\n{"step": 2, "loss": 0.5}\n{"step": 3}\n{"step"')
    assert [row for row, _ in rows_after(path, second)] == [{"step": 2, "loss": 0.5}, {"step": 3}]
    assert [row["step"] for row, _ in rows_after(path, first)] == [2, 3]
    assert [row["step"] for row, _ in rows_after(path, 0)] == [1, 2, 3]
