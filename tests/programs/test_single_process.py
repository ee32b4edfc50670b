"""Complete runs in one process. Each run takes one or two seconds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from rlframe.agents.networks import MLPConfig
from rlframe.engines.threads import InlineEngine
from rlframe.errors import EnvError, NonFiniteLossError, UsageError
from rlframe.learners.checkpoints import Checkpointer
from rlframe.metrics import read_jsonl
from rlframe.programs import evaluate, load_experiment, make_experiment, run_experiment
from rlframe.programs.experiment import Experiment
from rlframe.programs.run_dir.directory import Result
from rlframe.programs.session import Session
from rlframe.programs.topologies.makers import make_agent
from rlframe.programs.topologies.single_process import single_process
from rlframe.programs.training.loop import TrainingLoop
from tests.fakes import ProgressRecorder

SMALL_NETWORK = {"network": "mlp", "network_config": MLPConfig((16,))}


def ppo(**fields) -> Experiment:
    """Make a small PPO experiment. Each update uses 16 steps from each of 2 environments."""
    values = {"steps": 600, "num_envs": 2, "env_type": "loop", "eval_episodes": 2, **SMALL_NETWORK}
    return make_experiment("ppo", **{**values, "unroll_length": 16, "num_epochs": 2, "num_minibatches": 2, **fields})


FINISHED_FIELDS = {"log_every": 100, "eval_every": 250}
FINISHED = ppo(**FINISHED_FIELDS)


def dqn(**fields) -> Experiment:
    values = {"steps": 400, "num_envs": 2, "env_type": "loop", "eval_episodes": 2, "min_replay_size": 50}
    values |= {
        **SMALL_NETWORK,
        "update_period": 4,
        "batch_size": 8,
        "target_update_period": 20,
        "n_step": 3,
        "prioritized": True,
    }
    return make_experiment("dqn", **{**values, **fields})


def rainbow(**fields) -> Experiment:
    """Make a small DQN experiment. It has the settings of the Rainbow preset, but a small network and replay."""
    preset = make_experiment("dqn", "Pong-v5", preset="dqn/rainbow_atari").agent_config
    parts = ("double", "head", "optimizer", "epsilon", "max_grad_norm")
    own = {"network_config": MLPConfig((16,), dueling=True, noisy=0.5)}
    return dqn(**{name: getattr(preset, name) for name in parts}, **{**own, **fields})


def impala(**fields) -> Experiment:
    """Make a small IMPALA experiment. Each update uses 4 unrolls of 8 steps from 2 environments."""
    values = {"steps": 600, "num_envs": 2, "env_type": "loop", "eval_episodes": 2, **SMALL_NETWORK}
    return make_experiment("impala", **{**values, "unroll_length": 8, "batch_size": 4, **fields})


@contextlib.contextmanager
def open_loop(experiment: Experiment, path) -> Iterator[TrainingLoop]:
    """Make the training loop of a run, without running it."""
    engine = InlineEngine()
    single_process(engine, Session(experiment, make_agent(experiment), path, until=experiment.steps, began=0.0))
    loop = engine.handle_of("train")
    with contextlib.closing(loop):
        yield loop


def saved_arrays(run_dir) -> list[np.ndarray]:
    """Return the parameters and the learner state of the last checkpoint of a run."""
    import orbax.checkpoint as ocp

    steps = Checkpointer(run_dir / "checkpoints").steps()
    with ocp.CheckpointManager(run_dir / "checkpoints") as manager:
        saved = manager.restore(steps[-1], args=ocp.args.StandardRestore())
    return [np.asarray(saved["leaves"][name]) for name in sorted(saved["leaves"])]


def assert_same_arrays(run_dir, other) -> None:
    arrays, others = saved_arrays(run_dir), saved_arrays(other)
    assert len(arrays) == len(others) > 3
    for array, expected in zip(arrays, others, strict=True):
        np.testing.assert_array_equal(array, expected)


@dataclasses.dataclass(frozen=True)
class Finished:
    """A complete run of `ppo(log_every=100, eval_every=250)`, with the calls of its callback and progress display."""

    run_dir: pathlib.Path
    result: Result
    called: list[tuple[int, dict[str, float]]]
    progress: ProgressRecorder


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Finished:
    run_dir, called, progress = tmp_path_factory.mktemp("finished") / "run", [], ProgressRecorder()
    result = run_experiment(
        FINISHED,
        run_dir=run_dir,
        callbacks=[lambda info: called.append((info.step, info.values))],
        progress=progress,
        notes={"preset": "ppo/cartpole"},
    )
    return Finished(run_dir, result, called, progress)


@pytest.fixture
def copied(finished, tmp_path) -> Finished:
    """Copy a complete run, for tests that resume it."""
    run_dir = shutil.copytree(finished.run_dir, tmp_path / "run")
    return dataclasses.replace(
        finished, run_dir=run_dir, result=dataclasses.replace(finished.result, run_dir=str(run_dir))
    )


def test_run_writes_all_files_to_its_directory(tmp_path, learning_curves):
    result = run_experiment(ppo(), run_dir=tmp_path / "run")
    assert 600 <= result.env_steps < 602
    # 600 // 32 = 18 updates. The first step after an episode's end also counts, so two more updates are possible.
    assert 18 <= result.learner_steps <= 20
    assert result.params_version == result.learner_steps + 1
    assert result.episodes == 2 and result.return_mean >= 8.0
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {"config.json", "metrics.jsonl", "metrics.csv", "tensorboard", "checkpoints", "learning_curve.png"}
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result.to_json()
    assert load_experiment(tmp_path / "run") == ppo()


def test_agent_that_logs_an_array_is_refused(tmp_path):
    (tmp_path / "agent.py").write_text(LOGS_AN_ARRAY)
    with pytest.raises(UsageError, match=r"logs 'td_errors' as float32 of shape \(8,\); a log is one number"):
        run_experiment(
            make_experiment(f"{tmp_path}/agent.py:Logs", steps=400, min_replay_size=50, batch_size=8),
            run_dir=tmp_path / "run",
        )


LOGS_AN_ARRAY = """
import jax.numpy as jnp
from rlframe.agents import DQN

class Logs(DQN):
    def learner_step(self, params, learner_state, batch):
        params, learner_state, logs = super().learner_step(params, learner_state, batch)
        return params, learner_state, {**logs, "td_errors": jnp.zeros(8)}
"""


def test_row_of_the_logs_contains_values_since_the_previous_row(finished):
    rows = [row for row in read_jsonl(finished.run_dir / "metrics.jsonl") if "return_mean" not in row]
    assert [row["step"] // 100 for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["learner_steps"] in (18, 19)
    assert {"loss", "entropy", "staleness", "steps_per_second", "episode_return"} <= set(rows[3])
    assert rows[3]["staleness"] == 0.0  # PPO in a single process is on-policy
    assert rows[3]["replay_items"] < 2  # the queue is empty after the update


def test_learner_makes_one_update_for_each_batch_that_a_step_completes(tmp_path):
    result = run_experiment(impala(num_envs=16, unroll_length=4, batch_size=2), run_dir=tmp_path / "run")
    assert result.learner_steps >= result.env_steps // (16 * 4) * 8


@pytest.mark.parametrize(
    ("num_envs", "batch_size"),
    [(2, 4), (16, 2), *(pytest.param(*sizes, marks=pytest.mark.system) for sizes in ((3, 8), (26, 32)))],
)
def test_queue_is_large_enough_to_lose_no_unroll(num_envs, batch_size, tmp_path):
    with open_loop(impala(num_envs=num_envs, batch_size=batch_size), tmp_path) as loop:
        actor, replay_buffer = loop.driver.actor, loop.driver.replay_buffer
        for _ in range(30 * 8):
            actor.step()
            while replay_buffer.sample() is not None:
                pass
        stats = replay_buffer.stats()
    unrolls = 30 * num_envs
    assert (stats["added"], stats["evicted_unsampled"]) == (unrolls, 0)
    assert stats["sampled"] == unrolls - unrolls % batch_size


def test_callback_receives_every_row(finished):
    assert [step // 100 for step, values in finished.called if "return_mean" not in values] == [1, 2, 3, 4, 5, 6]
    last = finished.called[-1][1]
    assert last["eval_episodes"] == 2 and "episodes" not in last


def test_progress_display_receives_the_activities_before_the_first_update_and_every_row_once(finished):
    assert sum("return_mean" in row for row in finished.progress.rows) == 3
    assert sum("episode_return" in row for row in finished.progress.rows) == 6
    activities = list(dict.fromkeys(finished.progress.activities))
    assert activities == ["compiling", "filling the replay", "making the first update", ""]


@pytest.mark.parametrize("make", [ppo, dqn, impala])
def test_update_and_actor_are_compiled_before_the_first_step(make, tmp_path, caplog):
    """Compilations in the thread of `compile_ahead` are not logged, because `log_compiles` is for one thread."""
    with open_loop(make(), tmp_path) as loop, jax.log_compiles():
        while loop.driver.advance(1e9, lambda: False) is None:
            pass
        assert loop.learner.learner_steps > 0
    compiled = re.findall(r"XLA compilation of jit\((\w+)\)", caplog.text)
    assert [name for name in compiled if name.startswith(("_update", "step"))] == []


def test_evaluations_run_at_their_interval_and_at_the_end(finished):
    rows = [row for row in read_jsonl(finished.run_dir / "metrics.jsonl") if "return_mean" in row]
    assert [row["step"] // 50 for row in rows] == [5, 10, 12]


def test_rlframe_evaluate_gives_the_same_return_as_the_run(finished):
    again = evaluate(finished.run_dir, episodes=2)
    assert again["return_mean"] == finished.result.return_mean
    assert again["params_version"] == finished.result.params_version


@pytest.mark.system
@pytest.mark.parametrize("make", [ppo, dqn, impala])
def test_equal_seeds_give_equal_parameters_and_different_seeds_do_not(make, tmp_path):
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        run_experiment(make(seed=seed), run_dir=tmp_path / name)
    assert_same_arrays(tmp_path / "a", tmp_path / "b")
    with pytest.raises(AssertionError):
        assert_same_arrays(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize(
    "make", [dqn, *(pytest.param(make, marks=pytest.mark.system) for make in (ppo, rainbow, impala))]
)
def test_resumed_run_is_identical_to_an_uninterrupted_run(make, tmp_path):
    experiment = make(learning_rate="linear:1e-3:0")
    run_experiment(experiment, run_dir=tmp_path / "whole")
    # After 215 steps, an episode, an unroll and an n-step window are incomplete.
    stopped = run_experiment(experiment, run_dir=tmp_path / "parts", stop_at=215)
    assert 215 <= stopped.env_steps < 218
    whole = run_experiment(experiment, run_dir=tmp_path / "parts", resume=True)
    assert whole.env_steps == json.loads((tmp_path / "whole" / "result.json").read_text())["env_steps"]
    assert_same_arrays(tmp_path / "whole", tmp_path / "parts")
    rows, others = (
        [row for row in read_jsonl(tmp_path / name / "metrics.jsonl") if row["step"] > 400]
        for name in ("whole", "parts")
    )
    timed = ("wall_seconds", "steps_per_second")
    assert [{k: v for k, v in row.items() if k not in timed} for row in rows] == [
        {k: v for k, v in row.items() if k not in timed} for row in others
    ]


@pytest.mark.system
def test_resumed_run_resets_environments_that_cannot_be_saved(tmp_path):
    experiment = dqn(env_type="envpool")
    stopped = run_experiment(experiment, run_dir=tmp_path / "run", stop_at=200)
    result = run_experiment(experiment, run_dir=tmp_path / "run", resume=True)
    assert result.env_steps >= 400 > stopped.env_steps
    assert result.learner_steps > stopped.learner_steps > 0


@pytest.mark.system
def test_resumed_run_with_more_steps_keeps_the_end_of_its_schedules(tmp_path, caplog):
    experiment = ppo(learning_rate="linear:1e-3:0")
    run_experiment(experiment, run_dir=tmp_path / "run")
    run_experiment(dataclasses.replace(experiment, steps=700), run_dir=tmp_path / "run", resume=True)
    assert load_experiment(tmp_path / "run").schedule_steps == 600
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "learning_rate" in row]
    assert rows[-1]["step"] > 650 and rows[-1]["learning_rate"] == 0.0
    assert "schedules of the run ended at step 600" in caplog.text and "learning_rate is 0." in caplog.text


def test_resuming_a_complete_run_returns_its_result(copied, tmp_path, capsys):
    first = dataclasses.replace(copied.result, run_dir=str(tmp_path / "run"))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.json*")}
    progress = ProgressRecorder()
    assert run_experiment(FINISHED, run_dir=tmp_path / "run", resume=True, progress=progress) == first
    assert f"Nothing is left to do: {tmp_path}/run reached its 600 steps." in capsys.readouterr().err
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.json*")}
    assert after == before and json.loads(before[tmp_path / "run" / "config.json"])["notes"]["preset"] == "ppo/cartpole"
    assert first.env_steps > 600  # more than 600, because all environments make the last step
    beyond = dataclasses.replace(FINISHED, steps=first.env_steps)
    assert run_experiment(beyond, run_dir=tmp_path / "run", resume=True) == first
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = dataclasses.replace(first, run_dir=str(tmp_path / "moved"))
    assert run_experiment(FINISHED, run_dir=tmp_path / "moved", resume=True) == moved


def test_complete_run_is_evaluated_again_with_new_evaluation_options(copied):
    first = copied.result
    again = run_experiment(ppo(**FINISHED_FIELDS, eval_episodes=3), run_dir=copied.run_dir, resume=True)
    assert (again.env_steps, again.learner_steps, again.episodes) == (first.env_steps, first.learner_steps, 3)


def test_existing_run_directory_is_refused_and_unchanged(finished):
    before = (finished.run_dir / "metrics.jsonl").read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        run_experiment(ppo(), run_dir=finished.run_dir)
    assert (finished.run_dir / "metrics.jsonl").read_bytes() == before


def test_run_with_an_invalid_environment_leaves_no_directory(tmp_path):
    with pytest.raises(UsageError, match="Did you mean 'CartPole-v1'"):
        run_experiment(ppo(env="CartPol-v1"), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


BREAKING_ENV = """
import gymnasium

class Breaks(gymnasium.Wrapper):
    steps = 0

    def step(self, action):
        Breaks.steps += 1
        if Breaks.steps == 300:
            raise RuntimeError("the simulator crashed")
        observation, reward, *rest = self.env.step(action)
        return observation, {reward}, *rest

def make():
    return Breaks(gymnasium.make("CartPole-v1"))
"""


def test_environment_exception_ends_the_run_and_keeps_its_progress(tmp_path):
    (tmp_path / "env.py").write_text(BREAKING_ENV.format(reward="reward"))
    experiment = ppo(env=f"{tmp_path}/env.py:make", log_every=100)
    with pytest.raises(EnvError, match="the simulator crashed"):
        run_experiment(experiment, run_dir=tmp_path / "run")
    before = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] // 100 for row in before] == [1, 2]
    updates = before[-1]["learner_steps"]
    assert updates >= 6

    result = run_experiment(experiment, run_dir=tmp_path / "run", resume=True)
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert rows[:2] == before  # the resumed run keeps the earlier rows and continues the step count
    assert [row["step"] // 100 for row in rows[2:]] == [3, 4, 5, 6, 6]
    assert 600 <= result.env_steps < 602
    assert 18 <= result.learner_steps <= 20


@pytest.mark.system
def test_run_without_a_checkpoint_starts_again_on_resume(tmp_path, caplog):
    once = BREAKING_ENV.format(reward="float('nan') if Breaks.steps == 250 else reward").replace("== 300", "== -1")
    (tmp_path / "env.py").write_text(once)
    experiment = ppo(env=f"{tmp_path}/env.py:make", log_every=100, check_finite=False)
    with pytest.raises(NonFiniteLossError, match="Nothing was saved before"):
        run_experiment(experiment, run_dir=tmp_path / "run")
    result = run_experiment(experiment, run_dir=tmp_path / "run", resume=True)
    assert "ended before its first checkpoint. Its learner starts from the beginning" in caplog.text
    assert 600 <= result.env_steps < 602
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] // 100 for row in rows] == [1, 2, 3, 4, 5, 6, 6]


KILLED_ENV = """
import os
import pathlib
import signal

import gymnasium

def make():
    first = pathlib.Path(__file__).with_name("first")
    if not first.exists():
        first.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return gymnasium.make("CartPole-v1")
"""


@pytest.mark.system
@pytest.mark.parametrize("topology", ["single_process", "heavy_env"])
def test_run_killed_during_construction_can_be_resumed(tmp_path, topology):
    (tmp_path / "env.py").write_text(KILLED_ENV)
    options = ["--agent", "impala", "--env", f"{tmp_path}/env.py:make", "--steps", "200", "--num-envs", "2"]
    options += ["--env-type", "loop", "--unroll-length", "8", "--batch-size", "2", "--eval-episodes", "1", "--quiet"]
    several = ["--topology", topology, "--engine", "threads"] if topology != "single_process" else []
    command = [sys.executable, "-m", "rlframe", "train", *options, *several, "--run-dir", str(tmp_path / "run")]
    assert subprocess.run(command, timeout=240).returncode == -signal.SIGKILL
    experiment = load_experiment(tmp_path / "run")
    assert (experiment.topology_config.name, experiment.steps) == (topology, 200)
    assert run_experiment(experiment, run_dir=tmp_path / "run", resume=True).env_steps >= 200


def test_run_without_updates_logs_a_warning(tmp_path, caplog):
    result = run_experiment(dqn(min_replay_size=500, steps=1000), run_dir=tmp_path / "run", stop_at=400)
    assert result.learner_steps == 0
    assert f"The run made no update in {result.env_steps} environment steps. The first update needs 504." in caplog.text


@pytest.mark.parametrize(("env", "kind"), [("CartPole-v1", "loop"), ("CartPole-v1", "envpool"), ("Pong-v5", "auto")])
def test_answer_timeout_is_refused_if_the_pool_does_not_read_it(tmp_path, env, kind):
    experiment = make_experiment("ppo", env, env_type=kind, answer_timeout=60.0)
    read_by = "envpool" if kind == "auto" else kind
    message = f"answer_timeout=60 is for the env_type thread or process. The env_type {read_by} does not read it"
    with pytest.raises(UsageError, match=message):
        run_experiment(experiment, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["loop", "auto"])
def test_num_workers_is_refused_if_the_pool_is_a_loop(tmp_path, kind):
    experiment = make_experiment("ppo", "CartPole-v1", num_envs=4, env_type=kind, num_workers=2)
    with pytest.raises(UsageError, match=r"num_workers=2 is for the env_type thread, .* Add --env-type process"):
        run_experiment(experiment, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_answer_timeout_is_refused_if_the_engine_does_not_read_it(tmp_path):
    experiment = make_experiment(
        "ppo", "CartPole-v1", topology="heavy_env", engine="threads", env_type="loop", answer_timeout=60.0
    )
    with pytest.raises(UsageError, match="answer_timeout=60 is for the env_type thread or process. The env_type loop"):
        run_experiment(experiment, run_dir=tmp_path / "run")


RECORDING_ENV = """
import gymnasium

class Recorder(gymnasium.Wrapper):
    def __init__(self, env):
        super().__init__(env)
        self.file = open({path!r}, "a")  # a file object also prevents saving the environment's state

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.file.write(f"{{seed}}\\n")
            self.file.flush()
        return self.env.reset(seed=seed, options=options)

def make():
    return Recorder(gymnasium.make("CartPole-v1"))
"""


@pytest.mark.system
def test_resumed_run_without_its_replay_fills_a_new_replay_with_new_seeds(tmp_path, caplog):
    (tmp_path / "env.py").write_text(RECORDING_ENV.format(path=str(tmp_path / "seeds")))
    experiment = dqn(env=f"{tmp_path}/env.py:make", prioritized=False)
    stopped = run_experiment(experiment, run_dir=tmp_path / "run", stop_at=200)
    for path in (tmp_path / "run" / "checkpoints" / "replay").iterdir():
        path.unlink()
    result = run_experiment(experiment, run_dir=tmp_path / "run", resume=True)
    assert "Learning waits until the buffer is full enough again" in caplog.text
    assert 400 <= result.env_steps < 403
    # About (200 - 50) / 4 updates, because learning waits for 50 steps.
    assert stopped.learner_steps + 30 < result.learner_steps <= stopped.learner_steps + 40

    seeds = [int(line) for line in (tmp_path / "seeds").read_text().split()]
    acted, evaluated, acted_after_resume, evaluated_again = seeds[:2], seeds[2:4], seeds[4:6], seeds[6:]
    assert len({*acted, *evaluated, *acted_after_resume}) == 6
    assert evaluated_again == evaluated


@pytest.mark.system
def test_replay_file_is_ignored_if_its_checkpoint_does_not_exist(tmp_path):
    experiment = dqn(checkpoint_every=100)
    run_experiment(experiment, run_dir=tmp_path / "whole")
    run_experiment(experiment, run_dir=tmp_path / "run", stop_at=150)
    # Simulate a crash after a replay file was written, but before the checkpoint with the same number was written.
    (tmp_path / "run" / "checkpoints" / "replay" / "399").write_bytes(b"unfinished")
    run_experiment(experiment, run_dir=tmp_path / "run", resume=True, stop_at=250)
    run_experiment(experiment, run_dir=tmp_path / "run", resume=True)
    assert_same_arrays(tmp_path / "whole", tmp_path / "run")


def test_non_finite_loss_ends_the_run_and_keeps_the_last_good_checkpoint(tmp_path):
    (tmp_path / "env.py").write_text(BREAKING_ENV.format(reward="float('nan') if Breaks.steps > 200 else reward"))
    experiment = ppo(env=f"{tmp_path}/env.py:make", checkpoint_every=100, check_finite=False)
    with pytest.raises(NonFiniteLossError, match=r"The last good checkpoint is .*/checkpoints/\d+"):
        run_experiment(experiment, run_dir=tmp_path / "run")
    assert all(np.isfinite(array).all() for array in saved_arrays(tmp_path / "run"))


def test_profile_covers_the_total_time(tmp_path):
    from rlframe.programs.training.profile import Profile

    profile = Profile()
    run_experiment(ppo(), run_dir=tmp_path / "run", profile=profile)
    rows = {row.name: row for row in profile.rows()}
    assert sum(row.share for row in rows.values()) == pytest.approx(1.0, abs=0.02)
    assert rows["learner"].calls in (17, 18)  # one less than the updates, because the first call compiles
    assert rows["environment"].calls == rows["replay add"].calls == rows["inference"].calls + 1
    assert profile.spec.kind == "queue"
