"""The output of a run's processes on the terminal and in `logs/NODE.log`."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys

import pytest

from rlframe.engines import logs
from rlframe.engines.group_rules import GroupRules
from rlframe.engines.supervision.nodes import StartableProcess
from rlframe.engines.supervision.supervisor import ProgramSupervisor
from rlframe.programs import make_experiment, run_experiment
from tests.programs.running_program import ROOT

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"

WARNS = """
import logging, sys
from rlframe.engines import logs
logs.set_up("actor/0")
print("printed")
logging.getLogger("rlframe.example").warning("a warning")
sys.exit(int(sys.argv[1]))
"""


def node(name, code, *arguments, **options):
    return StartableProcess(name, [sys.executable, "-c", code, *arguments], GroupRules(**options))


def test_restarted_program_appends_to_the_log_files_of_its_nodes(tmp_path):
    directory, output = tmp_path / "logs", io.StringIO()
    for _ in range(2):
        ProgramSupervisor(
            [node("actor/0", WARNS, "0"), node("b", "print('b')")], logs.NodeLogs(directory, output)
        ).run()
    assert sorted(path.name for path in directory.iterdir()) == ["actor-0.log", "b.log"]
    assert re.fullmatch(
        rf"(printed\n{STAMP} WARNING \[actor/0\] a warning\n){{2}}", (directory / "actor-0.log").read_text()
    )
    assert (directory / "b.log").read_text() == "b\nb\n"
    assert re.search(rf"^\[actor/0\] {STAMP} WARNING a warning$", output.getvalue(), re.MULTILINE)


def test_launcher_messages_about_a_node_are_in_its_log_file(tmp_path):
    dies_once = "import os, sys; p = sys.argv[1]; e = os.path.exists(p); open(p, 'w').close(); sys.exit(0 if e else 3)"
    output, once = io.StringIO(), str(tmp_path / "once")
    nodes = [node("a", dies_once, once, max_restarts=1)]
    ProgramSupervisor(nodes, logs.NodeLogs(tmp_path / "logs", output)).run()
    (line,) = (tmp_path / "logs/a.log").read_text().splitlines()
    assert re.fullmatch(rf"{STAMP} WARNING \[a\] failed with exit code 3: restart 1 of 1 in 0.5 s", line)
    assert output.getvalue() == "[a] failed with exit code 3: restart 1 of 1 in 0.5 s\n"


def test_single_process_writes_warnings_to_its_log_file(tmp_path):
    experiment = make_experiment("dqn", num_envs=1, eval_episodes=1, min_replay_size=10_000)
    run_experiment(experiment, run_dir=tmp_path / "run", stop_at=50)
    kept = (tmp_path / "run/logs/train.log").read_text()
    assert re.search(rf"^{STAMP} WARNING \[train\] The run made no update in 50 environment steps", kept, re.MULTILINE)
    assert not logging.getLogger("rlframe").handlers


def test_warnings_also_go_to_stderr_if_logging_is_not_configured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with logs.logging_to_file(tmp_path / "logs", "train"):
        logging.getLogger("rlframe.example").warning("a warning")
    assert capsys.readouterr().err == "a warning\n"


@pytest.mark.system
@pytest.mark.parametrize("topology", ["heavy_env", "light_env"])
def test_normal_run_logs_no_warnings(topology, tmp_path):
    run_dir = tmp_path / "run"
    options = ["--topology", topology, "--num-actors", "4", "--steps", "10000", "--run-dir", str(run_dir)]
    found = subprocess.run(
        [sys.executable, "-m", "rlframe", "train", *options], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr
    assert not re.search("WARN|Traceback|Error", found.stdout + found.stderr), found.stderr
    names = {path.name for path in (run_dir / "logs").iterdir()}
    assert names == {"launcher.log"} or all((run_dir / "logs" / name).stat().st_size == 0 for name in names)
