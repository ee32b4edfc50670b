"""Tests of `rlframe train --seeds`: concurrent runs, the table of results, and resumed runs."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest

import rlframe
from rlframe.cli import seeds as cli_seeds
from rlframe.cli.main import main
from rlframe.cli.multi_run import parse_seeds
from rlframe.errors import UsageError
from rlframe.metrics.terminal import format_number
from rlframe.programs.run_dir.directory import Result
from rlframe.programs.run_dir.lock import RunLock
from tests.waiting import wait_until

QUICK = ["train", "--env", "CartPole-v1", "--preset", "none", "--num-envs", "4", "--unroll-length", "16"]
QUICK += ["--num-minibatches", "1", "--num-epochs", "1", "--eval-episodes", "1", "--network", "mlp"]
QUICK += ["--network.hidden", "4"]
BOTH = ["--steps", "200", "--seeds", "3,4"]
FUSED = ["--env", "jax:CartPole-v1", "--topology", "fused"]


@pytest.mark.parametrize(
    ("text", "seeds"), [("1-3", [1, 2, 3]), ("7", [7]), ("1,5,2", [1, 5, 2]), ("1-2, 10", [1, 2, 10])]
)
def test_seeds_option_accepts_ranges_and_numbers(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *(("1-", "got '1-'"), ("a", "got 'a'"), ("1-3,2", "a seed twice"), ("3-1", "empty"), ("3-1,7", "empty")),
        *(("1-1000,2000", "1,001 seeds, but at most 1,000 are"), ("1-2147483647", "contains 2,147,483,647 seeds")),
        ("1-2147483648", "a seed must be at most 2147483647, got 2147483648"),
    ],
)
def test_invalid_seeds_are_refused(text, why):
    with pytest.raises(UsageError, match=why):
        parse_seeds(text)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Return the directory with the two finished runs of seeds 3 and 4."""
    folder = tmp_path_factory.mktemp("seeds") / "both"
    assert main([*QUICK, *BOTH, "--at-once", "2", "--run-dir", str(folder)]) == 0
    return folder


def test_each_seed_is_a_run_and_finished_runs_are_skipped(both, capfd):
    written = (both / "seed-3" / "metrics.jsonl").stat().st_mtime_ns
    assert main(["train", "--resume", "--seeds", "3,4", "--run-dir", str(both), "--json"]) == 0
    out, err = capfd.readouterr()
    assert (both / "seed-3" / "metrics.jsonl").stat().st_mtime_ns == written
    summary = json.loads(out.splitlines()[-1])
    results = [json.loads((both / f"seed-{seed}" / "result.json").read_text()) for seed in (3, 4)]
    assert summary["returns"] == [result["return_mean"] for result in results]
    assert summary["return_mean"] == sum(summary["returns"]) / 2
    assert summary["return_iqm"] is summary["return_iqm_interval"] is None  # two seeds are too few for them
    low, high = map(format_number, sorted(summary["returns"]))
    assert f"over seeds (lowest to highest: {low} to {high}); see" in err and "2 seeds: mean" in err
    assert (both / "learning_curve.png").stat().st_size > 10_000
    configs = [json.loads((both / f"seed-{seed}" / "config.json").read_text())["experiment"] for seed in (3, 4)]
    assert [config.pop("seed") for config in configs] == [3, 4] and configs[0] == configs[1]
    assert main([*QUICK, *BOTH, "--run-dir", str(both)]) == 2
    assert "both exists already. Choose another --run-dir, or continue the existing run" in capfd.readouterr().err


def test_result_of_four_seeds_is_the_interquartile_mean_with_a_confidence_interval(both, tmp_path, capfd):
    folder = tmp_path / "four"
    shutil.copytree(both, folder)
    for seed, returned in ((3, 10.0), (4, 20.0), (5, 30.0), (6, 100.0)):
        run = folder / f"seed-{seed}"
        if not run.exists():
            shutil.copytree(both / "seed-3", run)
            config = json.loads((run / "config.json").read_text())
            config["experiment"]["seed"] = seed
            (run / "config.json").write_text(json.dumps(config))
        result = {**json.loads((run / "result.json").read_text()), "return_mean": returned, "run_dir": str(run)}
        (run / "result.json").write_text(json.dumps(result))
    assert main(["train", "--resume", "--seeds", "3-6", "--run-dir", str(folder), "--json"]) == 0
    out, err = capfd.readouterr()
    summary = json.loads(out.splitlines()[-1])
    assert (summary["returns"], summary["return_iqm"]) == ([10.0, 20.0, 30.0, 100.0], 25.0)
    low, high = summary["return_iqm_interval"]
    assert 10.0 <= low < 25.0 < high <= 100.0
    ends = f"{format_number(low)} to {format_number(high)}"
    assert f"4 seeds: interquartile mean (IQM) 25.0 (95% interval: {ends}), mean 40.0 ± 35.4 over seeds" in err


def test_result_of_one_seed_is_shown_without_a_standard_deviation(both, tmp_path, capfd):
    folder = tmp_path / "one"
    shutil.copytree(both, folder)
    assert main(["train", "--resume", "--seeds", "3", "--run-dir", str(folder)]) == 0
    err = capfd.readouterr().err
    returned = json.loads((folder / "seed-3" / "result.json").read_text())["return_mean"]
    assert f"1 seed: return {format_number(returned)}; see" in err and "± 0.0" not in err


@pytest.mark.parametrize(("episodes", "spread"), [(1, ""), (2, "1.50")])
def test_table_shows_no_standard_deviation_for_a_single_episode(episodes, spread, capfd):
    result = Result(100, 7, 20.0, 1.5, episodes, 50.0, 2.0, 8, "run")
    summary = {"return_mean": 20.0, "return_std": 0.0}
    cli_seeds._print_table([(3, result)], summary, pathlib.Path("curve.png"))
    row = capfd.readouterr().err.splitlines()[1]
    assert row.split() == ["3", "20.0", *spread.split(), "100", "7", "50", "2"]


def test_resumed_seeds_keep_their_options(both, capfd):
    assert main(["train", "--resume", "--seeds", "3,4", "--run-dir", str(both), "--steps", "400"]) == 2
    assert "Resumed runs keep their options" in capfd.readouterr().err
    assert main([*QUICK, "--seeds", "1", "--take-over"]) == 2
    assert "--take-over needs --resume." in capfd.readouterr().err


@pytest.mark.parametrize("held", [".", "seed-4"])
def test_runs_that_another_process_uses_are_not_resumed(held, both, capfd):
    with RunLock(both / held):
        assert main(["train", "--resume", "--seeds", "3,4", "--run-dir", str(both)]) == 2
    err = capfd.readouterr().err
    assert f"{both / held} is in use by process {os.getpid()}" in err and "with --resume --take-over" in err


def test_stop_command_ends_the_process_that_runs_several_seeds(both, capfd):
    held = "import sys, time, pathlib; from rlframe.programs.run_dir.lock import RunLock\n"
    held += "with RunLock(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    holder = subprocess.Popen([sys.executable, "-c", held, str(both)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        assert main(["stop", str(both)]) == 0
        assert holder.wait() == -signal.SIGTERM
    finally:
        holder.kill()
        holder.communicate()
        (both / "run.lock").unlink()
    resume = f"rlframe train --seeds 3,4 --resume --run-dir {both}"
    assert capfd.readouterr().out == (
        f"The runs have ended. The progress of all runs is saved. Resume with: {resume}\n"
    )


def test_commands_for_a_single_run_refuse_a_directory_with_several_seeds(both, capfd):
    picture = (both / "learning_curve.png").stat().st_mtime_ns
    why = f"{both} contains the runs of several seeds: {both}/seed-3, {both}/seed-4. Name one of them, or resume all "
    why += f"with: rlframe train --seeds 3,4 --resume --run-dir {both}"
    for command in (["train", "--resume", "--run-dir"], ["evaluate"], ["status"], ["stop"]):
        assert main([*command, str(both)]) == 2
        assert why in capfd.readouterr().err
    for call in (rlframe.load, lambda path: rlframe.train(run_dir=path, resume=True)):
        with pytest.raises(UsageError, match=re.escape(why)):
            call(both)
    assert (both / "learning_curve.png").stat().st_mtime_ns == picture


def test_plot_of_several_seeds_shows_each_run(both, capfd, tmp_path):
    # The second list is what a shell passes for the argument both/seed-*.
    for number, named in enumerate([[both], sorted(both.glob("seed-*"))]):
        assert main(["plot", *map(str, named), "--out", str(tmp_path / f"{number}.png")]) == 0
        assert capfd.readouterr().out == f"{tmp_path}/{number}.png\n"
    assert (tmp_path / "0.png").read_bytes() == (tmp_path / "1.png").read_bytes()
    assert (tmp_path / "0.png").read_bytes() == (both / "learning_curve.png").read_bytes()
    (both / "learning_curve.png").unlink()
    assert main(["plot", str(both)]) == 0 and (both / "learning_curve.png").stat().st_size > 10_000


def test_resuming_a_single_run_with_the_seeds_option_is_refused(both, capfd):
    run = both / "seed-3"
    assert main(["train", "--resume", "--seeds", "1-2", "--run-dir", str(run)]) == 2
    command = f"rlframe train --resume --run-dir {run}"
    assert f"{run} contains a single run. Resume it with: {command}" in capfd.readouterr().err
    assert not (run / "seed-1").exists()


@pytest.mark.system
def test_failed_seed_is_reported_and_other_results_are_kept(tmp_path, capfd):
    folder = tmp_path / "all"
    folder.mkdir()
    (folder / "seed-2").write_text("in the way")
    assert main([*QUICK, "--steps", "200", "--seeds", "1,2", "--run-dir", str(folder), "--resume"]) == 2
    assert "There is no run in" in capfd.readouterr().err  # Without config.json, a run cannot be resumed.
    (folder / "seed-2").unlink()
    command = [*QUICK, "--steps", "200", "--seeds", "1,2", "--run-dir", str(folder)]
    assert main(command) == 0
    capfd.readouterr()
    for name in ("result.json", "config.json"):
        (folder / "seed-2" / name).unlink()  # Without its files, the run with seed 2 cannot be resumed.
    assert main([*command, "--resume"]) == 2
    err = capfd.readouterr().err
    assert "seed 2: ended with exit code 2; see" in err and "1 seed: return" in err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--stop-at 100", "--stop-at is only for a single run, but --seeds starts several."),
        ("--http 8000", "--http 8000 is a port for a single run, but --seeds starts several. Use --http 0: each run"),
        ("--seed 3", "--seeds 1-2 starts one run for each seed: leave --seed out."),
        ("--steps 10", "A run of 10 environment steps would make no update"),
        ("--env CartPole-v7", "Unknown environment 'CartPole-v7'. Did you mean 'CartPole-v1'?"),
        ("--http-host 0.0.0.0", "http_host is an option of the HTTP service, but this run has none"),
        (" ".join([*FUSED, "--wandb"]), "--wandb needs a process for each run, but the topology fused runs all seeds"),
        (" ".join([*FUSED, "--profile"]), "--profile is only for a single run, but --seeds starts several."),
    ],
)
def test_invalid_options_are_refused_before_any_run_starts(arguments, why, tmp_path, capfd):
    assert main([*QUICK, "--seeds", "1-2", "--run-dir", str(tmp_path / "all"), *arguments.split()]) == 2
    assert why in capfd.readouterr().err
    assert not (tmp_path / "all").exists()


def test_fused_runs_all_seeds_in_one_process(tmp_path, capfd):
    folder = tmp_path / "all"
    assert main([*QUICK, *FUSED, *BOTH, "--run-dir", str(folder), "--json"]) == 0
    out, err = capfd.readouterr()
    runs = [folder / "seed-3", folder / "seed-4"]
    results = [json.loads((run / "result.json").read_text()) for run in runs]
    summary = json.loads(out.splitlines()[-1])
    assert (summary["seeds"], summary["returns"]) == ([3, 4], [result["return_mean"] for result in results])
    assert all(result["stopped_by"] == "steps" and 200 <= result["env_steps"] < 264 for result in results)
    assert re.search(r"2 runs: steps 400 / 400 .*return [\d.]+  time 0:\d\d", err)
    assert "2 seeds: mean" in err and f"seed 4: started in {runs[1]}" in err and "seed 4: return" in err
    assert {json.loads((run / "status.json").read_text())["pid"] for run in runs} == {os.getpid()}
    picture = (folder / "learning_curve.png").read_bytes()
    assert main(["plot", str(folder)]) == 0 and (folder / "learning_curve.png").read_bytes() == picture
    evaluated = rlframe.evaluate(runs[1], episodes=1)
    assert evaluated["return_mean"] == results[1]["return_mean"] and rlframe.load(runs[1]) is not None
    assert main(["train", "--resume", "--seeds", "3,4", "--run-dir", str(folder), "--quiet"]) == 0
    assert [json.loads((run / "result.json").read_text()) for run in runs] == results


@pytest.mark.system
def test_ctrl_c_and_the_stop_command_end_all_seeds_in_one_process(tmp_path):
    folder = tmp_path / "all"
    command = [sys.executable, "-m", "rlframe", *QUICK, *FUSED, "--seeds", "1-2", "--run-dir", str(folder)]
    command += ["--log-every", "1000", "--steps", "100000000"]
    resume = ["rlframe", "train", "--seeds", "1-2", "--resume", "--run-dir", str(folder)]
    runs = [folder / f"seed-{seed}" for seed in (1, 2)]

    def steps() -> list[int]:
        return [json.loads((run / "result.json").read_text())["env_steps"] for run in runs]

    def stop_after_rows(command, stop, signal_number) -> str:
        before = [(run / "metrics.jsonl").stat().st_size if run.exists() else 0 for run in runs]
        process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE)
        try:
            rows = [run / "metrics.jsonl" for run in runs]
            wait_until(
                lambda: all(path.exists() and path.stat().st_size > size for path, size in zip(rows, before)),
                seconds=240.0,
            )
            stop(process)
            _, err = process.communicate(timeout=60.0)
        finally:
            process.kill()
        assert process.returncode == 128 + signal_number, err
        *_, first, second, last = without_progress(err)
        assert sorted((first, second)) == ["seed 1: stopped", "seed 2: stopped"]
        assert last.endswith(f"Resume with: {' '.join(resume)}")
        return err.decode()

    stop_after_rows(command, lambda process: os.killpg(process.pid, signal.SIGINT), signal.SIGINT)
    before = steps()
    assert min(before) > 0 and all(list((run / "checkpoints").iterdir()) for run in runs)
    resume_here = [sys.executable, "-m", *resume]
    stop_after_rows(resume_here, lambda process: main(["stop", str(folder)]), signal.SIGTERM)
    assert all(after > number for after, number in zip(steps(), before))


@pytest.mark.system
def test_ctrl_c_saves_all_runs_so_that_they_can_be_resumed(tmp_path):
    folder = tmp_path / "all"
    command = [sys.executable, "-m", "rlframe", *QUICK, "--seeds", "1-2", "--at-once", "2", "--run-dir", str(folder)]
    process = subprocess.Popen([*command, "--steps", "100000000"], start_new_session=True, stderr=subprocess.PIPE)
    try:
        rows = [folder / f"seed-{seed}" / "metrics.jsonl" for seed in (1, 2)]
        wait_until(lambda: all(path.exists() and path.stat().st_size > 0 for path in rows), seconds=60.0)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60.0)
    finally:
        process.kill()
    assert process.returncode == 130, err
    said = "0 of 2 runs are finished. The progress of the other runs is saved. Resume with: "
    *ends, last = without_progress(err)[-3:]
    assert sorted(ends) == ["seed 1: stopped", "seed 2: stopped"]
    assert last == f"{said}rlframe train --seeds 1-2 --resume --run-dir {folder}"
    for seed in (1, 2):
        run = folder / f"seed-{seed}"
        steps = json.loads((run / "result.json").read_text())["env_steps"]
        assert "SIGINT: saving after the current step" in (folder / "logs" / f"seed-{seed}.log").read_text()
        assert steps > 0 and list((run / "checkpoints").iterdir())  # The run got one signal only, and has saved.
        assert not running(run)


def without_progress(err: bytes) -> list[str]:
    """Return the lines of stderr. A line about the progress of both runs can come at any time, so leave it out."""
    return [line for line in err.decode().splitlines() if not line.startswith("2 runs: ")]


def running(run_dir: pathlib.Path) -> list[int]:
    import psutil

    return [p.pid for p in psutil.process_iter(["cmdline"]) if str(run_dir) in (p.info["cmdline"] or [])]
