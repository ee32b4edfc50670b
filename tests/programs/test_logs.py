"""What the processes of a run say: on the terminal, and in `logs/NODE.log`."""

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
from rlframe.engines.supervision.program_supervisor import ProgramSupervisor
from rlframe.programs import make_experiment, run_experiment
from tests.programs.running_program import ROOT

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"

WARNS = """
import logging, sys
from rlframe.engines import logs
logs.set_up("actor/0")
print("plain")
logging.getLogger("rlframe.somewhere").warning("it is cold")
sys.exit(int(sys.argv[1]))
"""


def node(name, code, *arguments, **options):
    return StartableProcess(name, [sys.executable, "-c", code, *arguments], GroupRules(**options))


def test_each_line_of_a_node_is_kept_in_its_file_with_time_level_and_node_over_restarts(tmp_path):
    directory, output = tmp_path / "logs", io.StringIO()
    for _ in range(2):
        ProgramSupervisor(
            [node("actor/0", WARNS, "0"), node("b", "print('b')")], logs.NodeLogs(directory, output)
        ).run()
    assert sorted(path.name for path in directory.iterdir()) == ["actor-0.log", "b.log"]
    assert re.fullmatch(
        rf"(plain\n{STAMP} WARNING \[actor/0\] it is cold\n){{2}}", (directory / "actor-0.log").read_text()
    )
    assert (directory / "b.log").read_text() == "b\nb\n"
    assert re.search(rf"^\[actor/0\] {STAMP} WARNING it is cold$", output.getvalue(), re.MULTILINE)


def test_what_the_launcher_says_of_a_node_is_in_the_nodes_file(tmp_path):
    dies_once = "import os, sys; p = sys.argv[1]; e = os.path.exists(p); open(p, 'w').close(); sys.exit(0 if e else 3)"
    output, once = io.StringIO(), str(tmp_path / "once")
    nodes = [node("a", dies_once, once, max_restarts=1)]
    ProgramSupervisor(nodes, logs.NodeLogs(tmp_path / "logs", output)).run()
    (line,) = (tmp_path / "logs/a.log").read_text().splitlines()
    assert re.fullmatch(rf"{STAMP} WARNING \[a\] failed with exit code 3: restart 1 of 1 in 0.5 s", line)
    assert output.getvalue() == "[a] failed with exit code 3: restart 1 of 1 in 0.5 s\n"


def test_a_single_process_keeps_its_warnings(tmp_path):
    described = make_experiment("dqn", num_envs=1, eval_episodes=1, min_replay_size=10_000)
    run_experiment(described, run_dir=tmp_path / "run", stop_at=50)
    kept = (tmp_path / "run/logs/train.log").read_text()
    assert re.search(rf"^{STAMP} WARNING \[train\] The run made no update in 50 environment steps", kept, re.MULTILINE)
    assert not logging.getLogger("rlframe").handlers


def test_a_warning_that_is_kept_is_shown_still_where_nobody_set_logging_up(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with logs.logging_to_file(tmp_path / "logs", "train"):
        logging.getLogger("rlframe.somewhere").warning("it is cold")
    assert capsys.readouterr().err == "it is cold\n"


@pytest.mark.system
@pytest.mark.parametrize("topology", ["heavy_env", "light_env"])
def test_a_whole_run_in_which_nothing_happens_warns_of_nothing(topology, tmp_path):
    run_dir = tmp_path / "run"
    options = ["--topology", topology, "--num-actors", "4", "--steps", "10000", "--run-dir", str(run_dir)]
    found = subprocess.run(
        [sys.executable, "-m", "rlframe", "train", *options], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr
    assert not re.search("WARN|Traceback|Error", found.stdout + found.stderr), found.stderr
    names = {path.name for path in (run_dir / "logs").iterdir()}
    assert names == {"launcher.log"} or all((run_dir / "logs" / name).stat().st_size == 0 for name in names)
