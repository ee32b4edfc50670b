"""Topologies on the `threads` engine. It has the same nodes and connections as other engines, but starts faster."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading

import pytest

from rlframe.agents.networks import MLPConfig
from rlframe.engines.threads import ThreadsEngine
from rlframe.errors import CheckpointError, ProgramError, UsageError
from rlframe.learners import Checkpointer
from rlframe.metrics import read_jsonl
from rlframe.programs import evaluate, load_experiment, make_experiment, run_experiment
from rlframe.programs.experiment import Experiment
from tests.fakes import ProgressRecorder

SMALL = {"network": "mlp", "network_config": MLPConfig((16,)), "env_type": "loop", "eval_episodes": 2, "num_envs": 4}


def small_experiment(agent: str, topology: str, **fields) -> Experiment:
    values = {**SMALL, "steps": 1_000, "topology": topology, "engine": "threads", "log_every": 200, **fields}
    return make_experiment(agent, **values)


@pytest.mark.parametrize("topology", ["heavy_env", pytest.param("light_env", marks=pytest.mark.system)])
def test_program_writes_the_same_files_and_result_as_a_single_process(tmp_path, topology, learning_curves):
    rows = []
    experiment = small_experiment("impala", topology, unroll_length=8, batch_size=4)
    result = run_experiment(
        experiment, run_dir=tmp_path / "run", callbacks=[lambda info: rows.append((info.step, info.values))]
    )
    assert 1_000 <= result.env_steps < 3_000
    assert result.learner_steps == result.params_version - 1 > 10
    assert result.episodes == 2 and result.return_mean is not None and result.return_mean > 0
    assert json.loads((tmp_path / "run/result.json").read_text()) == result.to_json()
    assert load_experiment(tmp_path / "run") == experiment
    written = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in written] == [step for step, _ in rows]
    assert written[-1]["return_mean"] == result.return_mean
    assert {"staleness", "replay_items"} <= set(rows[-2][1]) and rows[-2][1]["learner_steps"] == result.learner_steps
    assert (tmp_path / "run/learning_curve.png").exists()
    again = evaluate(tmp_path / "run", episodes=2)  # `evaluate` loads the last checkpoint
    assert (again["return_mean"], again["params_version"]) == (result.return_mean, result.params_version)


@pytest.mark.system
def test_progress_display_shows_the_start_of_the_nodes_until_the_first_update(tmp_path):
    progress = ProgressRecorder()
    experiment = small_experiment("impala", "heavy_env", engine="local", unroll_length=8, batch_size=4, num_actors=1)
    run_experiment(experiment, run_dir=tmp_path / "run", progress=progress)
    assert "starting: learner, actor, monitor" in progress.activities
    assert "collecting data for the first update" in progress.activities


def test_program_makes_updates_at_the_configured_ratio(tmp_path):
    values = {"min_replay_size": 100, "update_period": 4, "batch_size": 8, "prioritized": True, "n_step": 3}
    result = run_experiment(small_experiment("dqn", "heavy_env", **values), run_dir=tmp_path / "run")
    due = (result.env_steps - 100) / 4
    assert 0.8 * due <= result.learner_steps <= 1.1 * due


@pytest.mark.system
def test_evaluations_run_during_training(tmp_path):
    experiment = small_experiment("impala", "heavy_env", unroll_length=8, batch_size=4, eval_every=300, steps=10_000)
    run_experiment(experiment, run_dir=tmp_path / "run")
    evaluated = [row["step"] for row in read_jsonl(tmp_path / "run/metrics.jsonl") if "return_mean" in row]
    assert len(evaluated) >= 2


def test_resumed_program_continues_its_counts(tmp_path):
    experiment = small_experiment("impala", "heavy_env", unroll_length=8, batch_size=4)
    first = run_experiment(experiment, run_dir=tmp_path / "run", stop_at=500)
    assert first.env_steps >= 500
    more = dataclasses.replace(experiment, steps=first.env_steps + 500)
    again = run_experiment(more, run_dir=tmp_path / "run", resume=True)
    assert again.env_steps >= first.env_steps + 500
    assert again.learner_steps > first.learner_steps
    assert again.params_version > first.params_version
    steps = [row["step"] for row in read_jsonl(tmp_path / "run/metrics.jsonl")]
    assert steps == sorted(steps)


def test_program_goes_back_to_the_steps_of_an_older_checkpoint(tmp_path):
    experiment = small_experiment(
        "impala", "heavy_env", unroll_length=8, batch_size=4, eval_episodes=0, log_every=50, checkpoint_every=300
    )
    checkpointer = Checkpointer(tmp_path / "run/checkpoints")  # It keeps the newest three.
    first = run_experiment(experiment, run_dir=tmp_path / "run")
    oldest = checkpointer.steps()[0]
    assert oldest < first.learner_steps
    again = run_experiment(experiment, run_dir=tmp_path / "run", resume=True, resume_from=oldest)
    assert again.learner_steps > oldest + 1 and again.env_steps >= 1_000
    rows = read_jsonl(tmp_path / "run/metrics.jsonl")
    steps, learned = ([row[name] for row in rows if name in row] for name in ("step", "learner_steps"))
    assert steps == sorted(steps) and learned == sorted(learned)


@pytest.mark.system
def test_stopped_program_reports_a_failed_save(tmp_path, monkeypatch):
    experiment = small_experiment("impala", "heavy_env", unroll_length=8, batch_size=4, steps=10**8, log_every=100)

    def fail(*args, **kwargs):
        raise CheckpointError("the disk is full")

    def session(*, resume, learned=0):
        rows = []

        def callback(info):
            if not rows and info.values.get("learner_steps", 0) > learned:
                rows.append(info.step)
                if resume:
                    monkeypatch.setattr(Checkpointer, "save", fail)
                os.kill(os.getpid(), signal.SIGINT)

        return run_experiment(experiment, run_dir=tmp_path / "run", callbacks=[callback], resume=resume)

    first = session(resume=False)
    assert first.signal == signal.SIGINT
    newest = Checkpointer(tmp_path / "run/checkpoints").steps()[-1]
    # On a slow machine, a periodic save can fail before the save at the end of the run.
    ended = "The node learner failed(?: while the program ended)?: CheckpointError: the disk is full"
    with pytest.raises(ProgramError, match=rf"{ended}\nThe last checkpoint is .*run/checkpoints/{newest}. Resume with"):
        session(resume=True, learned=first.learner_steps)


def test_replay_that_the_topology_does_not_support_is_refused():
    with pytest.raises(UsageError, match="The topology distributed needs replay=reverb or service, got"):
        small_experiment("impala", "distributed", replay="shared_memory")
    with pytest.raises(UsageError, match="The topology single_process needs replay=local, got"):
        make_experiment("impala", replay="reverb")
    with pytest.raises(UsageError, match=r"elastic needs .*, got '.*store.py:Mine'. It supports no other"):
        small_experiment("impala", "elastic", replay="store.py:Mine")
    assert small_experiment(
        "impala", "heavy_env", replay="store.py:Mine"
    ).topology_config.replay_kind == os.path.abspath("store.py:Mine")


def test_default_operator_of_elastic_depends_on_the_engine():
    def elastic(**options):
        return make_experiment("impala", **{"topology": "elastic", **options}).topology_config

    assert elastic().operator_name == "local" and elastic(engine="ray").operator_name == "ray"
    assert elastic(engine="ray", operator="local").operator_name == "local"
    assert elastic(operator="mine.py:Operator").operator_name == os.path.abspath("mine.py:Operator")
    assert elastic(engine="ray", replay="service").spans_machines
    assert not elastic(engine="ray").spans_machines and not elastic(replay="service").spans_machines
    with pytest.raises(
        UsageError, match=r"The operator ray needs the engine ray, but the engine is local. Add --engine ray"
    ):
        elastic(operator="ray")
    with pytest.raises(UsageError, match="no operator 'locale'; .* Did you mean 'local'"):
        elastic(operator="locale")
    with pytest.raises(UsageError, match="the engine threads has none"):
        elastic(engine="threads")


def test_environments_are_divided_equally_between_actors_and_pools():
    assert small_experiment("impala", "light_env", num_envs=8, num_pools=2).envs_per_pool == 2
    assert small_experiment("impala", "heavy_env", num_envs=8, num_actors=4).envs_per_actor == 2
    assert make_experiment("impala", num_envs=7).envs_per_actor == 7
    with pytest.raises(UsageError, match="num_envs=6 cannot be shared evenly by num_actors=2 with num_pools=2 each"):
        small_experiment("impala", "light_env", num_envs=6, num_pools=2)


def test_one_environment_gives_one_actor_by_default():
    preset = make_experiment("sac", "Pendulum-v1", topology="heavy_env")
    assert preset.topology_config.num_actors == preset.num_envs == 1
    assert make_experiment("sac", "Pendulum-v1", topology="heavy_env", num_envs=4).topology_config.num_actors == 2
    with pytest.raises(UsageError, match="num_envs=1 cannot be shared evenly by num_actors=2 .* or change num_actors"):
        make_experiment("sac", "Pendulum-v1", topology="heavy_env", num_actors=2)


@pytest.mark.parametrize(
    ("topology", "instead"), [("elastic", "shared_memory or --replay service"), ("distributed", "service")]
)
def test_reverb_with_the_ray_engine_is_refused_before_ray_starts(topology, instead):
    with pytest.raises(
        UsageError, match=f"The engine ray cannot run a Reverb server. Use --replay {instead}, or another"
    ):
        make_experiment("dqn", topology=topology, engine="ray", replay="reverb")


class Node:
    """A fake node whose `run` ends, raises, waits, or sends signals.

    Args:
        how: "ends", "raises", "waits" (until `stop` is called), "never ends", "presses twice" (sends two signals), or
            "presses when stopped" (sends one signal in `run` and one in `stop`).
    """

    def __init__(self, how: str) -> None:
        self.how, self.stopped = how, threading.Event()

    def run(self) -> None:
        if self.how == "raises":
            raise ValueError("failed")
        if self.how in ("presses twice", "presses when stopped"):
            os.kill(os.getpid(), signal.SIGINT)
        if self.how == "presses twice":
            os.kill(os.getpid(), signal.SIGTERM)  # not SIGINT, because the system can merge two equal pending signals
        if self.how not in ("ends", "raises"):
            assert self.stopped.wait(60.0)
        if self.how == "never ends":
            threading.Event().wait()

    def stop(self) -> None:
        self.stopped.set()
        if self.how == "presses when stopped":
            os.kill(os.getpid(), signal.SIGINT)


def test_threads_engine_ends_if_the_monitor_ends_or_a_node_fails():
    engine = ThreadsEngine()
    actor = engine.add("actor", Node, "waits")
    engine.add("monitor", Node, "ends")
    assert engine.run() is None and actor.stopped.is_set()
    engine = ThreadsEngine()
    actor = engine.add("actor", Node, "waits")
    engine.add("learner", Node, "raises")
    with pytest.raises(ProgramError, match="The node learner failed: ValueError: failed"):
        engine.run()
    assert actor.stopped.is_set()


def test_threads_engine_without_a_monitor_or_a_learner_ends_with_its_last_node():
    engine = ThreadsEngine()
    for group in ("actor", "actor", "other"):
        engine.add(group, Node, "ends")
    assert engine.run() is None


@pytest.mark.parametrize("how", ["presses twice", "presses when stopped"])
def test_second_ctrl_c_raises_if_the_learner_has_not_ended(how):
    engine = ThreadsEngine()
    engine.add("learner", Node, "never ends")
    engine.add("actor", Node, how)
    with pytest.raises((ProgramError, KeyboardInterrupt)) as caught:
        engine.run()
    assert str(caught.value).startswith("The node learner failed while the program ended: TimeoutError")
    engine = ThreadsEngine()
    engine.add("learner", Node, "ends")
    engine.add("actor", Node, how)
    engine.add("monitor", Node, "waits")
    # The system may deliver two different signals in any order.
    assert engine.run() in ([signal.SIGINT, signal.SIGTERM] if how == "presses twice" else [signal.SIGINT])
