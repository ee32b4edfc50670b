"""Tests of `rlframe sweep`: the options, the trials, and resumed sweeps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from rlframe.cli import sweep as cli_sweep
from rlframe.cli.main import main
from rlframe.cli.sweep_options import VariedOption, parse_varied_option
from rlframe.errors import UsageError
from rlframe.programs.options.saved_experiment import load_experiment
from rlframe.programs.run_dir.lock import RunLock
from tests.extras import needs
from tests.test_cli_seeds import QUICK, running
from tests.waiting import wait_until

needs("sweep")

# A fake of `python -m rlframe train`. The return of its run depends only on the seed and the learning rate.
RUN = """#!{python} -SE
import json, math, os, sys, time
def wait(condition):
    until = time.monotonic() + 60.0
    while not condition():
        if time.monotonic() > until:
            sys.exit("waited for a minute")
        time.sleep(0.01)

options = dict(zip(sys.argv[4::2], sys.argv[5::2]))
folder = options["--run-dir"]
content = json.load(open(sys.argv[sys.argv.index("--config") + 1]))["experiment"]
rate, seed = content["agent_config"]["learning_rate"], int(sys.argv[sys.argv.index("--seed") + 1])
ready = os.path.dirname(folder) + "/ready"
if rate > 0.5 and seed == 2:
    open(ready, "w").close()
    time.sleep(250.0)
    os.makedirs(folder)
if rate == 0.75 and seed == 1:  # fail after the run with seed 2 has started: Python can lose a SIGINT during imports
    wait(lambda: os.path.exists(ready))
if rate > 0.5:
    print("rlframe: The loss was not finite.")
    sys.exit(1)
os.makedirs(folder)
def write(name, value):  # Write atomically, like a real run, because the sweep can read the file at any time.
    json.dump(value, open(folder + "/." + name, "w"))
    os.replace(folder + "/." + name, folder + "/" + name)

write("config.json", {{"experiment": content}})
result = dict(env_steps=1, learner_steps=1, return_mean=seed - math.log10(rate), return_std=0.0, episodes=1)
result.update(steps_per_second=1.0, wall_seconds=1.0, params_version=1, run_dir=folder)
write("result.json", result)
beside = folder[:-1] + str(3 - seed)  # directory of the run with the other seed
if rate == 0.25 and seed == 1:
    open(folder + "/pid", "w").write(str(os.getpid()) + " ")
    wait(lambda: os.path.exists(beside + "/result.json"))
if rate == 0.25 and seed == 2:  # end after the sweep has noticed the end of the run with seed 1
    wait(lambda: os.path.exists(beside + "/pid") and open(beside + "/pid").read().endswith(" "))
    pid = open(beside + "/pid").read().strip()
    wait(lambda: not os.path.exists("/proc/" + pid))
"""


@pytest.fixture
def sweep(tmp_path, monkeypatch, capfd):
    """Return a function that runs `rlframe sweep`. The sweep starts the fake program instead of real runs.

    The function returns (exit code, JSON output or None, stderr).
    """
    python = tmp_path / "python"
    python.write_text(RUN.format(python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr("rlframe.cli.multi_run._POLL", 0.01)

    def run(*arguments: str):
        code = main(["sweep", "--preset", "none", "--json", *arguments])
        out, err = capfd.readouterr()
        return code, json.loads(out.splitlines()[-1]) if out else None, err

    return run


@pytest.mark.parametrize(
    ("text", "varied"),
    [
        ("learning-rate=1e-4..1e-2:log", VariedOption("learning-rate", ("1e-4", "1e-2"), is_range=True, log=True)),
        ("num_epochs=1..8", VariedOption("num-epochs", ("1", "8"), is_range=True)),
        ("x=-1..-.5", VariedOption("x", ("-1", "-.5"), is_range=True)),
        ("gae-lambda=0.9, 0.95", VariedOption("gae-lambda", ("0.9", "0.95"))),
        ("network.hidden=64 64,32", VariedOption("network.hidden", ("64 64", "32"))),
        ("network=../nets.py:make,mlp", VariedOption("network", ("../nets.py:make", "mlp"))),
    ],
)
def test_value_of_the_vary_option_is_a_range_or_a_list(text, varied):
    assert parse_varied_option(text) == varied


ALMOST = ["x=1..2:lo", "x=..:log", "x=1e-4..", "x=1..2,3", "x=1,2:log"]


@pytest.mark.parametrize("text", ["x", "x=", "=1,2", "x=1,,2", "x=2..1", "x=1..1", "x=0..1:log", *ALMOST])
def test_invalid_vary_option_is_refused(text):
    with pytest.raises(UsageError, match="--vary"):
        parse_varied_option(text)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("", "Name an option to vary: --vary learning-rate=1e-4..1e-2:log."),
        ("--vary learnin-rate=1e-3,1e-2", "There is no option --learnin-rate. Did you mean '--learning-rate'?"),
        ("--vary learning-rate=1e-3,fast", "learning_rate: 'fast' is not a schedule. Expected a number"),
        ("--vary num-epochs=1..2.5 --trials 3", "--num-epochs: invalid literal for int() with base 10: '2.5'"),
        ("--vary eval-every=1,2 --vary eval_every=3", "--vary eval-every is given twice"),
        ("--vary seed=1,2", "--vary seed: this option must be the same in all trials. Set it with --seed."),
        ("--vary at-once=1,2", "--vary at-once: this option must be the same in all trials"),
        ("--vary learning-rate=1e-3..1e-2", "learning-rate has a range, but a grid needs lists. Give the number of"),
        ("--vary num-epochs=1,2 --sampler grid --trials 2", "--sampler grid tries all combinations: leave --trials"),
        ("--vary num-epochs=1,2 --sampler tpe", "--sampler tpe needs --trials, at least 1, got None."),
        ("--vary num-epochs=1,2 --seeds 1-", "--seeds must look like 1-5 or 1,2,7, got '1-'."),
        ("--vary num-epochs=1,2 --stop-at 9", "--stop-at is only for a single run, but rlframe sweep starts several."),
        ("--vary network.hidden=1..3 --network mlp --trials 1", "network.hidden has a range but is not a number"),
        (
            "--vary normalize-advantages=1..2 --trials 1",
            "--vary normalize-advantages is a switch: its values must be True,False.",
        ),
        (
            "--vary learning-rate=1,2 --agent grpo",
            "rlframe sweep compares returns, but runs of --agent grpo have none.",
        ),
    ],
)
def test_invalid_sweep_is_refused_before_files_are_created(arguments, why, tmp_path, capfd):
    folder = tmp_path / "sweep"
    assert main(["sweep", "--quiet", "--run-dir", str(folder), *arguments.split()]) == 2
    assert why in capfd.readouterr().err
    assert not folder.exists()


@pytest.mark.parametrize(("returns", "spread"), [([20.0], []), ([20.0, 23.0], ["1.50"])])
def test_return_of_a_trial_with_one_seed_is_shown_without_a_standard_deviation(returns, spread, capfd):
    row = {"trial": 2, "returns": returns, "value": 20.0, "options": {"num-epochs": 4}}
    cli_sweep._print_table([VariedOption("num-epochs", ("4",))], [row])
    assert capfd.readouterr().err.splitlines()[1].split() == ["2", "20.0", *spread, "4"]


def test_grid_tries_every_combination_and_reports_the_best(sweep, tmp_path, capfd):
    folder = tmp_path / "sweep"
    arguments = ["--vary", "learning-rate=1e-3,1e-4", "--vary", "network.hidden=8,4 4", "--network", "mlp"]
    arguments += ["--seeds", "3,5", "--at-once", "2", "--run-dir", str(folder)]
    code, said, err = sweep(*arguments)
    assert code == 0, err
    assert (folder / "sweep.png").stat().st_size > 10_000
    assert [row["value"] for row in said["trials"]] == pytest.approx([8.0, 8.0, 7.0, 7.0])
    best = said["best"]
    assert best["trial"] == 2 and best["options"] == {"learning-rate": "1e-4", "network.hidden": "8"}
    assert best["returns"] == [7.0, 9.0]
    assert best["command"] == f"rlframe train --config {folder}/trial-2/config.json --seeds 6-10"
    assert "trial 2: return 8.00; the best is 8.00, of trial 2" in err and best["command"] in err
    experiments = [load_experiment(folder / f"trial-{i}") for i in range(4)]
    assert [(each.agent_config.learning_rate, each.topology_config.network_config.hidden) for each in experiments] == [
        *((1e-3, (8,)), (1e-3, (4, 4)), (1e-4, (8,)), (1e-4, (4, 4)))
    ]
    result = folder / "trial-2" / "seed-3" / "result.json"
    written = result.stat().st_mtime_ns
    # The resumed sweep starts no trial, because all have finished.
    assert sweep("--resume", "--run-dir", str(folder))[1] == said
    assert result.stat().st_mtime_ns == written
    assert "exists already. Choose another --run-dir" in sweep(*arguments)[2]
    for change in (["--num-epochs", "7"], ["--vary", "num-epochs=1,2"], ["--seeds", "1"]):
        assert "A resumed sweep keeps its options" in sweep("--resume", "--run-dir", str(folder), *change)[2]
    assert main(["train", "--resume", "--run-dir", str(folder)]) == 2
    runs = ", ".join(f"{folder}/trial-{trial}/seed-{seed}" for trial, seed in ((0, 3), (0, 5), (1, 3), (1, 5), (2, 3)))
    assert f"{folder} contains the runs of a sweep: {runs} and 3 more." in capfd.readouterr().err
    with RunLock(folder):
        assert "Wait for its end, stop it, or take over" in sweep("--resume", "--run-dir", str(folder))[2]


@pytest.mark.system
def test_resumed_sweep_samples_the_same_values_as_an_uninterrupted_sweep(sweep, tmp_path):
    arguments = ["--vary", "learning-rate=1e-5..1e-1:log", "--vary", "num-epochs=2..9", "--vary", "discount=0..0.5"]
    _, whole, err = sweep(*arguments, "--quiet", "--trials", "5", "--run-dir", str(tmp_path / "whole"))
    assert err == ""
    assert sweep(*arguments, "--trials", "2", "--run-dir", str(tmp_path / "parts"))[0] == 0
    _, parts, _ = sweep("--resume", "--trials", "5", "--run-dir", str(tmp_path / "parts"))
    options = [row["options"] for row in whole["trials"]]
    assert [row["options"] for row in parts["trials"]] == options
    assert len({each["learning-rate"] for each in options}) == 5
    assert all(1e-5 <= each["learning-rate"] <= 1e-1 and 0.0 <= each["discount"] <= 0.5 for each in options)
    assert all(isinstance(each["num-epochs"], int) and 2 <= each["num-epochs"] <= 9 for each in options)
    config = load_experiment(tmp_path / "whole" / f"trial-{whole['best']['trial']}").agent_config
    assert [config.learning_rate, config.num_epochs, config.discount] == list(whole["best"]["options"].values())


@pytest.mark.system
def test_tpe_finds_better_values_than_random_sampling(sweep, tmp_path):
    def late(sampler: str) -> float:
        folder = str(tmp_path / sampler)
        arguments = ["--vary", "learning-rate=1e-5..1e-1:log", "--trials", "25", "--sampler", sampler, "--quiet"]
        rows = sweep(*arguments, "--run-dir", folder)[1]["trials"]
        return sum(row["value"] for row in rows if row["trial"] >= 15) / 10

    assert late("tpe") > late("random") + 0.5


def test_sweep_prints_a_line_when_a_run_of_a_trial_ends(sweep, tmp_path):
    vary = ["--vary", "learning-rate=0.25", "--seeds", "1-2", "--at-once", "2"]
    _, said, err = sweep(*vary, "--run-dir", str(tmp_path / "sweep"))
    lines = [line.partition(":")[0] for line in err.splitlines() if line.startswith("trial 0, ")]
    assert lines == ["trial 0, seed 1", "trial 0, seed 2"] and len(said["best"]["returns"]) == 2


def test_failed_trial_is_reported_and_the_sweep_continues(sweep, tmp_path):
    folder = tmp_path / "sweep"
    code, said, err = sweep("--vary", "learning-rate=1e-3,1,1e-2", "--seeds", "1-2", "--run-dir", str(folder))
    assert code == 0 and [row["trial"] for row in said["trials"]] == [0, 2, 1]
    log = folder / "trial-1" / "logs" / "seed-1.log"
    why = f"seed 1 ended with exit code 1; see {log}: rlframe: The loss was not finite."
    assert said["trials"][2]["failed"] == why and f"trial 1 failed: {why}" in err
    assert not (folder / "trial-1" / "logs" / "seed-2.log").exists()


@pytest.mark.system
def test_other_runs_of_a_failed_trial_are_stopped(sweep, tmp_path):
    folder = tmp_path / "sweep"
    vary = ["--vary", "learning-rate=1e-3,0.75", "--seeds", "1-2", "--at-once", "2"]
    _, said, _ = sweep(*vary, "--run-dir", str(folder))
    assert "seed 1 ended with exit code 1" in said["trials"][1]["failed"]
    assert (folder / "trial-1" / "logs" / "seed-2.log").exists() and not (folder / "trial-1" / "seed-2").exists()


@pytest.mark.system
def test_trial_fails_if_rlframe_train_refuses_its_combination_of_options(sweep, tmp_path):
    vary = ["--vary", "topology=single_process,heavy_env", "--vary", "num-actors=2,4"]
    _, said, _ = sweep(*vary, "--run-dir", str(tmp_path / "sweep"))
    assert [row["trial"] for row in said["trials"]] == [0, 2, 3, 1]
    assert said["trials"][3]["failed"].startswith("num_actors=4 is for the topology heavy_env")


@pytest.mark.system
def test_sweep_ends_with_an_error_if_its_first_trial_fails(sweep, tmp_path):
    folder = tmp_path / "sweep"
    vary = ["--vary", "normalize-observations=True,false", "--vary", "learning-rate=1,1e-3"]
    code, said, err = sweep(*vary, "--run-dir", str(folder))
    assert code == 1 and said is None
    assert "Trial 0 failed, and no earlier trial succeeded: seed 1 ended with exit code 1; see " in err
    assert err.endswith("rlframe: The loss was not finite.\n") and not (folder / "trial-1").exists()
    code, said, err = sweep("--resume", "--run-dir", str(folder))
    assert code == 0 and [row["trial"] for row in said["trials"]] == [1, 3, 0, 2]
    made = [load_experiment(folder / f"trial-{i}").topology_config.normalize_observations for i in range(4)]
    assert made == [True, True, False, False]


@pytest.mark.system
def test_killed_sweep_resumes_its_unfinished_trial(tmp_path):
    folder = tmp_path / "sweep"
    command = [sys.executable, "-m", "rlframe", "sweep"]
    arguments = [*QUICK[1:], "--steps", "3000000", "--checkpoint-every", "2000", "--vary", "learning-rate=1e-3,1e-4"]
    begun = folder / "trial-0" / "seed-1"
    process = subprocess.Popen([*command, *arguments, "--run-dir", str(folder)], stderr=subprocess.PIPE)
    try:
        wait_until(lambda: list((begun / "checkpoints").glob("*")), seconds=60.0)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    process = subprocess.Popen([*command, "--resume", "--run-dir", str(folder)], stderr=subprocess.PIPE)
    try:  # The sweep takes over the active run. After Ctrl-C, the run saves.
        wait_until(lambda: "SIGTERM" in (folder / "trial-0" / "logs" / "seed-1.log").read_text(), seconds=60.0)
        rows = (begun / "metrics.jsonl").stat().st_size
        wait_until(lambda: (begun / "metrics.jsonl").stat().st_size > rows, seconds=60.0)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60.0)
    finally:
        process.kill()
    assert process.returncode == 130 and f"Resume with: rlframe sweep --resume --run-dir {folder}" in err.decode()
    result = json.loads((begun / "result.json").read_text())
    assert result["env_steps"] > 0 and result["return_mean"] is None
    assert not (folder / "trial-1").exists() and not running(begun)


@pytest.mark.system
def test_sweep_of_real_runs_finds_the_better_learning_rate(tmp_path, capfd):
    folder = tmp_path / "sweep"
    arguments = ["--vary", "learning-rate=1e-9,1e-3", "--at-once", "2", "--run-dir", str(folder)]
    assert main(["sweep", "--json", *arguments]) == 0
    said = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert said["best"]["options"] == {"learning-rate": "1e-3"}
    again = [*said["best"]["command"].split()[1:], "--run-dir", str(tmp_path / "again"), "--seeds", "7", "--json"]
    assert main(again) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["return_mean"] > 400.0
