"""The supervisor starts, restarts, stops and kills real processes. Each process runs a few lines of Python."""

from __future__ import annotations

import io
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading

import psutil
import pytest

from rlframe.engines.group_rules import GroupRules
from rlframe.engines.logs import NodeLogs
from rlframe.engines.supervision.nodes import STOP_SIGNAL, StartableProcess, end_program_of
from rlframe.engines.supervision.supervisor import Backoff, ProgramSupervisor
from rlframe.errors import ProgramError, UsageError
from tests.waiting import is_process_alive, wait_until

TIMEOUT = 60.0  # seconds; a test waits the full time only if it fails


def node(name: str, code: str, **options) -> StartableProcess:
    return StartableProcess(name, [sys.executable, "-S", "-c", textwrap.dedent(code)], GroupRules(**options))


FOREVER = "import time\nprint('up', flush=True)\nwhile True: time.sleep(60)"
# A program that exits with code 0 at SIGTERM, as nodes do.
SERVES = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nprint('up')\ntime.sleep(60)"


def run(*nodes: StartableProcess, backoff: Backoff | None = None) -> tuple[int | None, str]:
    output = io.StringIO()
    return ProgramSupervisor(nodes, NodeLogs(None, output), grace=TIMEOUT, backoff=backoff).run(), output.getvalue()


def assert_no_process_remains(before: set[int]) -> None:
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert not left


@pytest.fixture(autouse=True)
def no_process_remains():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    assert_no_process_remains(before)


def test_program_ends_when_all_nodes_have_ended():
    result, output = run(node("a", "print('one')"), node("b", "import sys; print('two', file=sys.stderr)"))
    assert result is None
    assert sorted(output.splitlines()) == ["[a] one", "[b] two"]


def test_program_ends_when_its_node_with_the_rule_ends_program_ends():
    result, output = run(
        node("learner", "print('done')", ends_program=True), node("actor/0", SERVES), node("b", FOREVER)
    )
    assert result is None and "[learner] done" in output
    assert "did not end within" not in output


def test_failed_node_ends_the_program_and_is_reported_with_its_traceback():
    with pytest.raises(ProgramError) as caught:
        run(node("learner", "def f():\n  raise ValueError('too bad')\nf()"), node("actor/1", SERVES))
    message = str(caught.value)
    assert message.startswith("The node learner failed with exit code 1. Its last lines:\nTraceback")
    assert message.endswith("ValueError: too bad")


def test_dead_node_is_restarted_at_most_max_restarts_times(tmp_path: pathlib.Path):
    count = f"with open({str(tmp_path / 'lives')!r}, 'a') as f: f.write('x')\n"
    dies = count + "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(ProgramError, match=r"The node actor/1 was killed by SIGKILL \(and 2 times before\)"):
        run(node("actor/1", dies, max_restarts=2), node("learner", SERVES, ends_program=True), backoff=Backoff(0.01))
    assert (tmp_path / "lives").read_text() == "xxx"


def test_program_with_a_recovered_node_ends_without_an_error(tmp_path: pathlib.Path):
    path = str(tmp_path / "been")
    once = f"import os, sys\nif not os.path.exists({path!r}):\n  open({path!r}, 'w'); sys.exit(3)\nprint('back')"
    result, output = run(
        node("learner", once, max_restarts=1, ends_program=True), node("actor", SERVES), backoff=Backoff(0.01)
    )
    assert result is None
    assert "[learner] failed with exit code 3: restart 1 of 1 in 0.01 s" in output and "[learner] back" in output


def test_node_that_ignores_sigterm_is_killed_after_the_grace_period():
    ignores_sigterm = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)"
    )
    output = io.StringIO()
    program = ProgramSupervisor([node("ignores_sigterm", ignores_sigterm)], NodeLogs(None, output), grace=0.5)
    threading.Thread(target=lambda: (wait_until(lambda: "up" in output.getvalue()), program.stop())).start()
    assert program.run() is None
    assert "[ignores_sigterm] did not end within 0.5 s: killed" in output.getvalue()


FAILS = FOREVER.replace("import time", "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: 1 / 0)")
IGNORES_SIGTERM = FOREVER.replace("import time", "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)")


def run_and_interrupt(
    *nodes: StartableProcess, once: str, times: int = 1, grace: float = TIMEOUT, backoff: Backoff | None = None
) -> tuple[int | None, str]:
    """Run a program, send Ctrl-C when `once` appears in its output, and return (signal number, output)."""
    output = io.StringIO()

    def interrupt() -> None:
        wait_until(lambda: once in output.getvalue())
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            # Wait, because two signals at the same time count as one.
            wait_until(lambda: "SIGINT: ending" in output.getvalue())

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        return ProgramSupervisor(nodes, NodeLogs(None, output), grace=grace, backoff=backoff).run(), output.getvalue()
    finally:
        thread.join()


def test_stopped_program_fails_if_a_node_that_must_save_fails():
    assert run_and_interrupt(node("learner", SERVES, must_save=True), once="[learner] up")[0] == signal.SIGINT
    result, output = run_and_interrupt(node("actor", FAILS), node("learner", SERVES, must_save=True), once="[actor] up")
    assert result == signal.SIGINT and "[actor] failed with exit code 1 while the program ended" in output
    lost = "while the program ended: its unsaved work is lost. Its last lines:\n"
    with pytest.raises(ProgramError, match=rf"^The node learner failed with exit code 1 {lost}Traceback(.|\n)*ZeroDiv"):
        run_and_interrupt(node("learner", FAILS, must_save=True), once="[learner] up")
    with pytest.raises(ProgramError, match=rf"^The node learner was killed by SIGKILL {lost}up"):
        run_and_interrupt(node("learner", IGNORES_SIGTERM, must_save=True), once="[learner] up", grace=0.5)


def test_second_ctrl_c_raises_only_if_a_node_that_must_save_has_not_saved():
    with pytest.raises(ProgramError, match="^The node learner was killed by SIGKILL while the program ended"):
        run_and_interrupt(node("learner", IGNORES_SIGTERM, must_save=True), once="[learner] up", times=2)
    output = io.StringIO()
    program = ProgramSupervisor(
        [node("learner", SERVES, must_save=True), node("actor", IGNORES_SIGTERM)], NodeLogs(None, output), grace=TIMEOUT
    )

    def interrupt() -> None:
        wait_until(lambda: "[learner] up" in output.getvalue() and "[actor] up" in output.getvalue())
        learner = next(child for child in psutil.Process().children() if "sys.exit(0)" in " ".join(child.cmdline()))
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: not learner.is_running())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert program.run() == signal.SIGINT
    thread.join()


def test_stopped_program_fails_if_a_dead_node_that_must_save_was_not_restarted():
    dies = node("learner", "1 / 0", must_save=True, max_restarts=1)
    with pytest.raises(
        ProgramError, match="The node learner had died and was not restarted before the program was stop"
    ):
        run_and_interrupt(dies, node("actor", SERVES), once="restart 1 of 1", backoff=Backoff(TIMEOUT, TIMEOUT))


def test_program_that_has_finished_succeeds_even_if_a_node_then_fails_to_save(tmp_path: pathlib.Path):
    path = str(tmp_path / "up")
    fails = FAILS.replace("print(", f"open({path!r}, 'w'); print(")
    ends = node("monitor", f"import os, time\nwhile not os.path.exists({path!r}): time.sleep(0.01)", ends_program=True)
    result, output = run(ends, node("learner", fails, must_save=True))
    assert result is None and "[learner] failed with exit code 1 while the program ended" in output


LAUNCHER = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
from rlframe.engines.supervision.nodes import StartableProcess
from rlframe.engines.supervision.nodes import STOP_SIGNAL
from rlframe.engines.supervision.supervisor import ProgramSupervisor
code = sys.argv[1]
nodes = [StartableProcess(name, [sys.executable, "-S", "-c", code]) for name in ("a", "b")]
print(ProgramSupervisor(nodes, grace=60.0).run())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, STOP_SIGNAL])
def test_launcher_ends_all_nodes_at_a_signal_and_returns_its_number(number: signal.Signals):
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, SERVES], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for _ in range(2):
        assert process.stderr.readline().endswith("up\n")
    process.send_signal(number)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert output.strip() == ("None" if number == STOP_SIGNAL else str(int(number)))
    assert process.returncode == 0


def test_second_ctrl_c_kills_all_nodes_immediately():
    ignores_sigterm = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, ignores_sigterm], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    for _ in range(2):
        assert process.stderr.readline().endswith(b"up\n")
    nodes = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == b"[launcher] SIGINT: ending 2 processes; repeat to kill them\n"
    process.send_signal(signal.SIGINT)
    process.wait(timeout=TIMEOUT / 2)
    assert b"did not end within" not in process.stderr.read()
    assert not any(map(is_process_alive, nodes))


def test_program_that_was_launched_outside_the_main_thread_cannot_be_ended_by_a_node():
    with pytest.raises(UsageError, match="cannot end its program: .* Launch the program in the main thread"):
        end_program_of(os.getpid())  # this process has no handler
