"""The page of learning results, from runs that were written by hand."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import types

import pytest

from benchmarks.results import language, page, runs
from benchmarks.results.tasks import TASKS, Task
from rlframe.metrics import JSONLLogger
from rlframe.metrics.files import read_jsonl

TASK = dataclasses.replace(TASKS[0], name="toy", env="Toy-v0", target=10.0, within=100, seeds=(1, 2, 3))

SPOKEN = dataclasses.replace(language.TASKS[0], name="toy-lm", env="toy.py:ToyLM", target=0.9, steps=200, seeds=(1, 2))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Runs and page are under `tmp_path`, and there is one task."""
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(page, "PAGE", tmp_path / "docs/results.md")
    monkeypatch.setattr(page, "IMAGES", tmp_path / "docs/images")
    monkeypatch.setattr(page, "TASKS", (TASK,))
    monkeypatch.setattr(language, "TASKS", (SPOKEN,))
    return tmp_path


def write_run(root: pathlib.Path, seed: int, evaluations: dict[int, float], *, load: float = 1.0, **config) -> None:
    directory = root / runs.run_dir(TASK, seed)
    directory.mkdir(parents=True)
    experiment = {"agent": TASK.agent, "env": TASK.env, "seed": seed, **config}
    notes = {"versions": {"python": "3.10.13", "jax": "0.5.3"}}
    (directory / "config.json").write_text(json.dumps({"experiment": experiment, "notes": notes}))
    logger = JSONLLogger(directory / "metrics.jsonl")
    for step, value in evaluations.items():
        logger.write(step, {"episode_return": value, "episodes": 1})
        logger.write(step, {"return_mean": value})
    logger.close()
    final_step, final = list(evaluations.items())[-1]
    result = {"env_steps": final_step, "return_mean": final, "return_std": 0.25, "steps_per_second": 1234.4}
    record = {"result": result, "seconds": 65.0, "date": "2026-01-02", "machine": "2 cores, AMD EPYC", "load": load}
    (directory / runs.RECORD).write_text(json.dumps(record))


def test_a_run_says_when_it_was_first_at_its_target(elsewhere):
    write_run(elsewhere, 1, {20: 9.9, 40: 10.0, 60: 3.0, 100: 11.0})
    outcome = runs.load(TASK, 1)
    assert (outcome.reached, outcome.return_mean, outcome.passed(TASK)) == (40, 11.0, True)


def test_a_final_policy_below_the_target_fails_though_an_earlier_one_reached_it(elsewhere):
    write_run(elsewhere, 1, {50: 12.0, 100: 9.0})
    assert not runs.load(TASK, 1).passed(TASK)


def test_a_target_that_is_reached_too_late_is_missed(elsewhere):
    write_run(elsewhere, 1, {200: 12.0})
    assert not runs.load(TASK, 1).passed(TASK)


def test_the_page_shows_every_finished_seed_and_its_picture(elsewhere):
    write_run(elsewhere, 1, {50: 5.0, 100: 10.5})
    write_run(elsewhere, 3, {50: 5.0, 100: 9.0})
    page.write()
    text = (elsewhere / "docs/results.md").read_text()
    assert "| 1 | 100 | 1 min 5 s | 1,234 | 10.5 ± 0.2 | 100 | yes |" in text
    assert "| 3 | 100 | 1 min 5 s | 1,234 | 9.0 ± 0.2 | never | **no** |" in text
    assert "| [PPO on Toy-v0](#ppo-on-toy-v0) | 10 | 100 steps | 10.5, 9.0 | 1 of 2 | 100 | 1 min 5 s |" in text
    assert "Machine: 2 cores, AMD EPYC, no accelerator. python 3.10.13, jax 0.5.3. 2026-01-02." in text
    assert "Other work" not in text
    assert "![PPO on Toy-v0: returns over environment steps](images/results-toy.png)" in text
    assert (elsewhere / "docs/images/results-toy.png").is_file()
    assert str(elsewhere) not in text


def test_a_busy_machine_is_mentioned(elsewhere):
    write_run(elsewhere, 1, {100: 10.5}, load=4.2)
    page.write()
    assert "Other work ran beside the runs (load average 4.2 to 4.2)" in (elsewhere / "docs/results.md").read_text()


def test_runs_with_different_settings_are_not_mixed(elsewhere):
    write_run(elsewhere, 1, {100: 10.5}, num_envs=8)
    write_run(elsewhere, 2, {100: 10.5}, num_envs=16)
    with pytest.raises(SystemExit, match="toy differ by more than their seed"):
        page.write()


def test_training_leaves_a_record_and_a_run_out_of_time_is_evaluated(elsewhere, monkeypatch):
    called: list[tuple[list[str], float | None]] = []

    def answer(arguments: list[str], seconds: float | None) -> dict[str, object]:
        called.append((arguments, seconds))
        (elsewhere / runs.run_dir(TASK, 2)).mkdir(parents=True, exist_ok=True)
        if arguments[0] == "evaluate":
            return {"return_mean": 7.0, "return_std": 1.0, "run_dir": "x"}
        return {"env_steps": 90, "return_mean": None, "return_std": None, "run_dir": "x"}

    monkeypatch.setattr(runs, "_rlframe", answer)
    task: Task = dataclasses.replace(TASK, seconds=3600.0)
    runs.train(task, 2)
    assert called[0][0][:3] == ["train", "--agent", "ppo"]
    assert [(arguments[0], seconds) for arguments, seconds in called] == [("train", 3600.0), ("evaluate", None)]
    record = json.loads((elsewhere / runs.run_dir(task, 2) / runs.RECORD).read_text())
    assert record["result"] == {"env_steps": 90, "return_mean": 7.0, "return_std": 1.0}
    assert runs.is_finished(task, 2)
    row = (elsewhere / runs.run_dir(task, 2) / "metrics.jsonl").read_text()
    assert json.loads(row) == {"step": 90, "return_mean": 7.0}


@pytest.mark.system
def test_a_command_that_runs_out_of_time_is_interrupted_and_its_last_line_read(elsewhere):
    program = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins without it
try:
    time.sleep(60)
except KeyboardInterrupt:
    print('{"env_steps": 5}')
    sys.exit(130)
"""
    (elsewhere / "rlframe.py").write_text(program)  # what `python -m rlframe` finds first where it starts
    assert runs._rlframe(["train"], 3.0) == {"env_steps": 5}


def test_a_command_that_fails_stops_everything(elsewhere):
    (elsewhere / "rlframe.py").write_text("import sys\nsys.exit(2)\n")
    with pytest.raises(SystemExit, match=r"rlframe train exited with 2"):
        runs._rlframe(["train"], None)


def test_all_tasks_name_their_sources():
    assert len({task.name for task in TASKS}) == len(TASKS)
    for task in TASKS:
        assert all(published.source[1].startswith("https://") for published in task.published), task.name


def write_language_run(root: pathlib.Path, seed: int, evaluations: list[float], imitated: list[float]) -> None:
    experiment = {"agent": "grpo", "env": SPOKEN.env, "seed": seed}
    for directory, values in (
        (runs.run_dir(SPOKEN, seed), evaluations),
        (language.imitation_dir(SPOKEN, seed), imitated),
    ):
        (root / directory).mkdir(parents=True)
        notes = {"versions": {"python": "3.10.13"}}
        (root / directory / "config.json").write_text(json.dumps({"experiment": experiment, "notes": notes}))
        experiment = {**experiment, "agent": "imitation alone"}
        logger = JSONLLogger(root / directory / "metrics.jsonl")
        for number, value in enumerate(values):
            row = {"return_mean": value, "eval/exact_match": value, "wall_seconds": 100.0 * (number + 1), "reward": 0.5}
            logger.write(500 * number, row)
        logger.close()
        runs.write_record(directory, {}, 650.0, ["rlframe", "train", "--json"])


def test_a_language_model_is_shown_beside_imitation_alone(elsewhere):
    write_language_run(elsewhere, 1, [0.6, 0.95, 0.8, 0.9, 0.98], [0.0, 0.5, 0.75])
    write_language_run(elsewhere, 2, [0.6, 0.95, 0.85], [0.01, 0.4])
    page.write()
    text = (elsewhere / "docs/results.md").read_text()
    assert "1 of 2 seeds reach it, from 400 s on (median). `rlframe train`" in text
    assert "| 1 | 0.000 | 0.600 | 0.980 | 0.50 to 0.50 | 2000 | 650 s | 400 s | 0.750 | 1,000 |" in text
    assert "| 2 | 0.010 | 0.600 | 0.850 | 0.50 to 0.50 | 1000 | 650 s | never | 0.400 | 500 |" in text
    assert (elsewhere / "docs/images/results-toy-lm.png").is_file()


def test_a_language_model_that_took_too_long_fails(elsewhere):
    write_language_run(elsewhere, 1, [0.6, 0.98], [0.0])
    outcome = language.load(SPOKEN, 1)
    assert outcome.passed(SPOKEN) and not outcome.passed(dataclasses.replace(SPOKEN, seconds=600.0))


@pytest.mark.system
def test_imitation_alone_begins_with_random_weights_and_learns(elsewhere, monkeypatch):
    env = f"{pathlib.Path(__file__).parents[2]}/examples/llm/reverse.py:Reverse"
    task = dataclasses.replace(SPOKEN, env=env)
    clock = iter(range(10_000))
    monkeypatch.setattr(language, "time", types.SimpleNamespace(monotonic=lambda: float(next(clock))))
    language.imitate(task, seed=1, seconds=60.0)
    rows = read_jsonl(elsewhere / language.imitation_dir(task, 1) / "metrics.jsonl")
    steps = [row["step"] for row in rows]
    assert steps[:2] == [0, 50] and rows[0]["return_mean"] < 0.05 < rows[-1]["return_mean"]
    assert runs.read_record(language.imitation_dir(task, 1))["seconds"] >= 60.0
