"""Tests of the page with learning results (docs/project/results.md), and of the records from which it is written."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest

from benchmarks.results import __main__ as command
from benchmarks.results import fused, language, page, records, runs
from benchmarks.results.language import LanguageRecord
from benchmarks.results.records import Record, RunInfo
from benchmarks.results.tasks import TASKS
from rlframe.metrics import JSONLLogger

TASK = dataclasses.replace(
    TASKS[0], name="toy", env="Toy-v0", goal=10.0, steps=100, seeds=(1, 2, 3), measure="mean", eval_every=10
)
LANGUAGE_TASK = dataclasses.replace(
    language.TASKS[0], name="toy-lm", env="toy.py:ToyLM", goal=0.9, steps=200, seeds=(1, 2)
)
RUN_INFO = RunInfo(
    seed=1,
    command="rlframe train",
    commit="abc1234",
    date="2026-01-02",
    machine="2 cores, AMD EPYC",
    beside="",
    load=1.0,
    versions={"python": "3.10.13", "jax": "0.5.3"},
    seconds=65.0,
    sessions=1,
)
RESULT = {
    "env_steps": 100,
    "steps_per_second": 1234.4,
    "return_mean": 10.0,
    "return_std": 0.25,
    "config": {},
    "evaluations": [[100, 10.0, 0.25]],
}


@pytest.fixture
def temporary_results(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Redirect the runs, the records and the page to `tmp_path`, with one task of each kind."""
    (tmp_path / "docs/project").mkdir(parents=True)
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setattr(records, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(page, "PAGE", tmp_path / "docs/project/results.md")
    monkeypatch.setattr(page, "IMAGES", tmp_path / "docs/images")
    for module in (page, command):
        monkeypatch.setattr(module, "TASKS", (TASK,))
    monkeypatch.setattr(language, "TASKS", (LANGUAGE_TASK,))
    return tmp_path


def write_record(seed: int, evaluations: dict[int, float], config: dict | None = None, **changes) -> None:
    step, final = list(evaluations.items())[-1]
    run_info = dataclasses.replace(RUN_INFO, seed=seed, **changes)
    record = Record(
        **vars(run_info),
        env_steps=step,
        steps_per_second=1234.4,
        return_mean=final,
        return_std=0.25,
        config=config or {},
        evaluations=[[step, value, 0.25] for step, value in evaluations.items()],
        training=[[step, value, 2] for step, value in evaluations.items()],
    )
    records.write(TASK.name, seed, record)


# --- the page


def test_page_in_git_matches_the_records_in_git():
    assert page.PAGE.read_text() == page.text(), "Write the page again: python -m benchmarks.results --page"


def test_every_record_names_ancestor_commits():
    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=runs.ROOT, capture_output=True, text=True)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("needs a clone with the complete history, to look up the commits of the records")
    files = {file: json.loads(file.read_text()) for file in records.RECORDS.glob("*/seed-*.json")}
    assert len(files) > 30
    for file, run_info in files.items():
        assert run_info["commit"] or "by hand" in run_info["note"], file
    for commit in {commit for run_info in files.values() for commit in run_info["commit"].split(", ") if commit}:
        assert git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0, commit


def test_all_tasks_state_their_sources_and_tuning_seeds():
    assert len({task.name for task in TASKS}) == len({task.title for task in TASKS}) == len(TASKS)
    for task in TASKS:
        assert all(published.source[1].startswith("https://") for published in task.published), task.name
        assert task.tuned.endswith(".") and task.steps >= 15 * task.eval_every, task.name


def test_score_is_the_mean_of_the_last_5_evaluations_or_the_final_return(temporary_results):
    write_record(1, {10: 100.0, 20: 1.0, 30: 2.0, 40: 3.0, 50: 4.0, 60: 20.0})
    record = records.read(Record, "toy", 1)
    assert page.score(TASK, record) == 6.0
    assert page.score(dataclasses.replace(TASK, measure="each"), record) == page.score(TASK, record)
    assert page.score(dataclasses.replace(TASK, measure="final"), record) == 20.0
    assert (record.reached(10.0), record.reached(3.0), record.reached(101.0)) == (10, 10, None)


def test_goal_applies_to_the_mean_over_seeds_or_to_each_seed(temporary_results):
    write_record(1, {100: 9.0})
    write_record(2, {100: 12.0})
    found = [records.read(Record, "toy", seed) for seed in (1, 2)]
    assert page.reaches(TASK, found)
    assert not page.reaches(dataclasses.replace(TASK, measure="each"), found)
    assert not page.reaches(dataclasses.replace(TASK, goal=10.6), found)


def test_task_without_a_record_is_listed_as_not_run_yet(temporary_results):
    text = page.text()
    assert "| PPO on Toy-v0 | 10 | **not run yet** |  | 100 steps |  | rl-baselines3-zoo 500.0 at 100,000 |  |" in text
    assert "| GRPO on ToyLM | 0.9, each | **not run yet** |" in text
    assert "## PPO on Toy-v0" not in text


def test_page_shows_every_seed_and_the_picture(temporary_results):
    write_record(1, {50: 5.0, 100: 10.5})
    write_record(3, {50: 5.0, 100: 9.0}, sessions=2)
    page.write()
    text = (temporary_results / "docs/project/results.md").read_text()
    assert "| 1 | 100 | 1 min 5 s | 1,234 | 7.8 | 10.5 ± 0.2 | 100 |" in text
    assert "| 3 | 100 | 1 min 5 s, 2 sessions | 1,234 | 7.0 | 9.0 ± 0.2 | never |" in text
    assert "| [PPO on Toy-v0](#ppo-on-toy-v0) | 10 | 7.4 | 7.8; 7.0 | 100 steps | 1 min 5 s |" in text
    assert "| 2 of 3 seeds so far |" in text
    assert "Machine: 2 cores, AMD EPYC, no accelerator. python 3.10.13, jax 0.5.3. 2026-01-02, commit abc1234." in text
    assert "load average" not in text
    assert "![PPO on Toy-v0: returns over environment steps](../images/results-toy.png)" in text
    assert (temporary_results / "docs/images/results-toy.png").is_file()
    write_record(2, {50: 5.0, 100: 30.0}, load=4.2, beside="2 runs at once", note="By hand.")
    assert page.text().count("| yes |") == 1
    assert "2 runs at once.\nThe load average at the end of the runs was 1.0 to 4.2." in page.text()
    assert "\nBy hand.\n" in page.text()


def test_page_states_the_conditions_of_the_runs(temporary_results):
    write_record(1, {100: 10.5}, commit="aaa1111", load=4.9, machine="4 cores, Arm")
    write_record(2, {100: 10.5}, commit="aaa1111, bbb2222", load=5.0, machine="4 cores, Arm", accelerator="TPU v4")
    conditions = "Machine: 4 cores, Arm, TPU v4 and 4 cores, Arm, no accelerator. "
    assert conditions in page.text() and "commit aaa1111, bbb2222." in page.text()
    assert "load average" not in page.text()
    write_record(2, {100: 10.5}, load=5.1, machine="4 cores, Arm")
    assert "was 4.9 to 5.1. With a load above the number of cores" in page.text()


def test_seeds_with_different_settings_are_rejected(temporary_results):
    write_record(1, {100: 10.5}, {"num_envs": 8, "steps": 100})
    write_record(2, {100: 10.5}, {"num_envs": 8, "newer": True})
    assert "2 of 3 seeds so far" in page.text()
    write_record(3, {100: 10.5}, {"num_envs": 16, "steps": 100})
    with pytest.raises(SystemExit, match="seeds 1 and 3 of toy differ by num_envs. Remove"):
        page.text()


def test_page_compares_a_language_model_with_imitation_learning_alone(temporary_results):
    for seed, values, imitated in ((1, [0.6, 0.95], [0.0, 0.75]), (2, [0.6, 0.85], [0.01, 0.4])):
        record = LanguageRecord(
            **vars(dataclasses.replace(RUN_INFO, seed=seed, seconds=650.0)),
            updates=200,
            before={"exact_match": values[0]},
            after={"exact_match": values[1]},
            rewards=(0.5, 0.9),
            reached=400.0 if seed == 1 else None,
            evaluations=[[100.0, values[0]], [400.0, values[1]]],
            imitated=[[0, 5.0, imitated[0]], [1000, 650.0, imitated[1]]],
        )
        records.write(LANGUAGE_TASK.name, seed, record)
        assert record.passed(LANGUAGE_TASK) == (seed == 1)
        assert not record.passed(dataclasses.replace(LANGUAGE_TASK, seconds=600.0))
    page.write()
    text = page.text()
    assert "1 of 2 seeds reach it, after 400 s (median). `rlframe train --agent grpo --env toy.py:ToyLM" in text
    assert "| 1 | 0.000 | 0.600 | 0.950 | 0.50 to 0.90 | 200 | 650 s | 400 s | 0.750 | 1,000 |" in text
    assert "| 2 | 0.010 | 0.600 | 0.850 | 0.50 to 0.90 | 200 | 650 s | never | 0.400 | 1,000 |" in text
    assert "0.900 | 0.950; 0.850 | 15 min 0 s at most | 10 min 50 s |  | **no** |" in text
    assert (temporary_results / "docs/images/results-toy-lm.png").is_file()


def test_comparison_shows_the_intervals_of_the_training_returns_at_half_the_steps(temporary_results, monkeypatch):
    tasks = [dataclasses.replace(TASK, name=name, variant=f" {name}") for name in ("a", "b")]
    monkeypatch.setattr(page, "TASKS", tasks)
    monkeypatch.setattr(page, "COMPARISONS", (fused.Comparison("A and b", tuple(tasks)),))

    def write(name: str, seed: int, returns: float) -> None:
        training = [[45, 1000.0, 9], [50, returns, 1], [55, returns + 4.0, 3], [60, 2000.0, 9], [100, 0.0, 1]]
        record = Record(**vars(dataclasses.replace(RUN_INFO, seed=seed)), **RESULT, training=training)
        records.write(name, seed, record)

    write("a", 1, 10.0)
    assert "A and b" not in page.text()
    write("a", 2, 20.0)
    for seed, returns in ((1, 19.0), (2, 31.0)):
        write("b", seed, returns)
    text = page.text()
    assert "## A and b" in text and "The intervals overlap." in text
    assert "| PPO on Toy-v0 a | 2 | 18.0 | 13.0 to 23.0 |" in text
    assert "| PPO on Toy-v0 b | 2 | 28.0 | 22.0 to 34.0 |" in text
    write("b", 1, 21.0)
    assert "**do not overlap**" in page.text()
    assert records.read(Record, "a", 1).training_return(0.6, 0.9) is None


def test_bootstrap_interval_of_a_mean_has_the_width_of_the_normal_approximation():
    values = np.random.RandomState(0).normal(5.0, 2.0, 400)
    low, high = records.mean_interval(values)
    error = values.std() / 20.0
    assert (low, high) == pytest.approx((values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.02)


def test_link_of_a_task_with_a_prefix_has_the_anchor_of_its_title(temporary_results, monkeypatch):
    monkeypatch.setattr(page, "TASKS", (dataclasses.replace(TASK, env="jax:Toy-v0", variant=" under fused"),))
    write_record(1, {100: 10.5})
    assert "[PPO on jax:Toy-v0 under fused](#ppo-on-jaxtoy-v0-under-fused)" in page.text()


# --- records from a program that simulates `rlframe train`

PROGRAM = """
import json, pathlib, signal, sys, time
arguments = sys.argv[1:]
if arguments[0] == "evaluate":
    print(json.dumps({"return_mean": 7.0, "return_std": 1.0, "episodes": 20}))
    sys.exit()
directory = pathlib.Path(arguments[arguments.index("--run-dir") + 1])
directory.mkdir(parents=True, exist_ok=True)
seed = next((int(arguments[i + 1]) for i, name in enumerate(arguments) if name == "--seed"), None)
if seed is not None:
    experiment = {"agent": "ppo", "env": "Toy-v0", "seed": seed, "num_envs": 8}
    config = {"experiment": experiment, "notes": {"versions": {"python": "3.10.13"}}}
    (directory / "config.json").write_text(json.dumps(config))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins without it
result = {"env_steps": 90, "return_mean": None, "return_std": None, "steps_per_second": 10.0}
rows = [{"step": 30, "episode_return": 1.0, "episodes": 2}, {"step": 60, "return_mean": 5.0, "return_std": 0.5}]
code = 0
try:
    (directory / "rows").write_text("".join(json.dumps(row) + "\\n" for row in rows))
    (directory / "rows").rename(directory / "metrics.jsonl")
    if "--wait" in arguments or seed == 2:
        time.sleep(60)
    result.update(env_steps=100, return_mean=11.0, return_std=2.0)
except KeyboardInterrupt:
    code = 130
if seed == 3:
    sys.exit(2)
(directory / "result.json").write_text(json.dumps(result))
print(" ".join(arguments))
sys.exit(code)
"""


@pytest.fixture
def program(temporary_results: pathlib.Path) -> pathlib.Path:
    """Make `python -m rlframe` run the program above."""
    (temporary_results / "rlframe.py").write_text(PROGRAM)
    return temporary_results


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run the command of `benchmarks.results`, but do not draw pictures."""
    monkeypatch.setattr(page, "draw_curves", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["benchmarks.results", *arguments])
    command.main()


def test_run_with_a_record_is_not_trained_again(program, monkeypatch):
    run_command(monkeypatch, "toy", "--seeds", "1", "--threads", "1")
    record = records.read(Record, "toy", 1)
    assert (record.env_steps, record.return_mean, record.return_std, record.sessions) == (100, 11.0, 2.0, 1)
    assert record.evaluations == [[60, 5.0, 0.5]] and record.training == [[30, 1.0, 2]]
    assert "| 1 of 3 seeds so far |" in (program / "docs/project/results.md").read_text()
    assert record.config == {"agent": "ppo", "env": "Toy-v0", "num_envs": 8}
    assert record.beside == "1 of JAX's threads each"
    assert record.command == "rlframe train --agent ppo --env Toy-v0 --steps 100 --eval-every 10 --seed 1"
    assert 0 < record.seconds < 60 and record.accelerator == "no accelerator"
    log = program / runs.RUNS / "toy-seed1.log"
    output = log.read_text()
    assert "--eval-every 10 --checkpoint-every 10 --replay-checkpoint-every 10 --seed 1" in output
    run_command(monkeypatch, "toy", "--seeds", "1")
    assert log.read_text() == output
    assert records.path("toy", 1).stat().st_size < 2_000


@pytest.mark.parametrize("arguments", [("tooy",), ("toy", "--seeds", "7"), ("toy", "--seeds", "1-")])
def test_unknown_task_or_seed_is_rejected(temporary_results, monkeypatch, capsys, arguments):
    with pytest.raises(SystemExit):
        run_command(monkeypatch, *arguments)
    output = capsys.readouterr().err
    assert "no task 'tooy'" in output or "toy has the seeds 1, 2, 3, none of 7" in output or "like 1-5" in output


@pytest.mark.parametrize("arguments", [("--at-once", "0"), ("--threads", "0"), ("--threads", "-1")])
def test_fewer_than_one_run_or_thread_is_rejected(temporary_results, monkeypatch, capsys, arguments):
    with pytest.raises(SystemExit):
        run_command(monkeypatch, "toy", *arguments)
    assert f"{arguments[0]} must be at least 1, got {arguments[1]}" in capsys.readouterr().err


def test_failed_run_is_reported_and_other_runs_continue(program, monkeypatch):
    with pytest.raises(SystemExit, match="toy, seed 3: exit code 2; see"):
        run_command(monkeypatch, "toy", "--seeds", "3,1", "--at-once", "2")
    assert records.path("toy", 1).is_file() and not records.path("toy", 3).exists()


def test_run_that_exceeds_its_time_limit_is_interrupted_and_evaluated(program, monkeypatch):
    rows = program / runs.RUNS / "toy-seed1/metrics.jsonl"
    monkeypatch.setattr(runs.Run, "seconds", property(lambda self: 1.0 if rows.exists() else 0.0))
    run = runs.Run("toy", 1, ["--wait"], stop_after=1.0)
    results = []
    assert runs.run_all([run], 1, lambda _, result: results.append(result)) == []
    assert results[0]["return_mean"] == 7.0 and results[0]["env_steps"] == 90
    assert records.game_record(run, results[0], RUN_INFO).evaluations == [[60, 5.0, 0.5], [90, 7.0, 1.0]]
    again = runs.Run("toy", 1, ["--wait"], stop_after=1.0)
    assert runs.run_all([again], 1, lambda _, result: results.append(result)) == []
    assert results[1] == results[0] and again.sessions == 1


def test_interrupted_run_is_resumed_and_its_time_is_summed(program):
    def interrupt(run: runs.Run, sent: signal.Signals) -> None:
        run.start()
        while not (run.directory / "metrics.jsonl").is_file():
            time.sleep(0.01)
        run._process.send_signal(sent)
        run._process.wait()

    first = runs.Run("toy", 2, [])
    interrupt(first, signal.SIGKILL)
    last_write = json.loads((program / runs.RUNS / "toy-seed2.json").read_text())["began"] + 1000.0
    os.utime(first.directory / "metrics.jsonl", (last_write, last_write))
    run = runs.Run("toy", 2, [])
    assert runs.run_all([run], 1, lambda *_: None) == []
    assert run.sessions == 2 and 1000.0 < run.seconds < 1060.0
    assert "--resume" in run.log.read_text()
    with pytest.raises(runs.RunFailed, match="interrupted after . s; it can be resumed"):
        other = runs.Run("other", 2, [])
        interrupt(other, signal.SIGINT)
        other.end()
    assert "began" not in json.loads((program / runs.RUNS / "other-seed2.json").read_text())


def test_training_curve_is_thinned_to_200_points(tmp_path):
    logger = JSONLLogger(tmp_path / "metrics.jsonl")
    for step in range(1, 1001):
        logger.write(step, {"episode_return": float(step), "episodes": step})
    logger.close()
    points = records.thinned(records.load_run(tmp_path))
    assert len(points) == 200 and points[-1][0] == 1000
    assert points[0] == [5, pytest.approx((1 + 4 + 9 + 16 + 25) / 15, abs=1e-4), 15]
    assert sum(point[2] for point in points) == 500_500


@pytest.mark.system
def test_imitation_learning_alone_starts_from_random_weights_and_learns(monkeypatch):
    env = f"{pathlib.Path(__file__).parents[2]}/examples/llm/reverse.py:Reverse"
    task = dataclasses.replace(LANGUAGE_TASK, env=env)
    clock = itertools.count()
    monkeypatch.setattr(language, "time", types.SimpleNamespace(monotonic=lambda: float(next(clock))))
    evaluations = language.imitate(task, seed=1, seconds=60.0)
    assert [updates for updates, _, _ in evaluations][:2] == [0, 50]
    assert evaluations[0][2] < 0.05 < evaluations[-1][2] and evaluations[-1][1] >= 60.0
