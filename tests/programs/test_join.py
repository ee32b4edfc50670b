"""Two launchers, as on two machines: they share TCP on two loopback addresses, and nothing else."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.extras import needs
from tests.ports import free_port
from tests.waiting import wait_until

needs("launchpad")

from rlframe.programs.guests import OPEN_GROUPS

ROOT = pathlib.Path(__file__).parents[2]
SMALL = ["--agent", "impala", "--env", "CartPole-v1", "--eval-episodes", "2", "--log-every", "200"]


class Launcher:
    """A command with its own working directory, temporary files and environment."""

    def __init__(self, host: pathlib.Path, *arguments: str, **env: str) -> None:
        self.host = host
        host.mkdir()
        self.out, self.err = host / "out", host / "err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = psutil.Popen(
                [sys.executable, "-m", "rlframe", *arguments],
                cwd=host,
                env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(host), **env},
                stdout=out,
                stderr=err,
            )
        self.seen: set[psutil.Process] = set()

    def node(self, name: str) -> psutil.Process:
        """The process of a node, once it carries its name."""

        def find() -> Any:
            assert self.process.status() != psutil.STATUS_ZOMBIE, f"It has ended:\n{self}"
            children = self.process.children()
            self.seen.update(children)
            return [child for child in children if child.cmdline()[:1] == [f"rlframe: {name}"]]

        return wait_until(find, f"{self} has no node {name}")[0]

    def end(self, seconds: float) -> int:
        """Waits for its end, and that nothing outlives it. Returns the exit code."""
        try:
            code = self.process.wait(seconds)
        except psutil.TimeoutExpired:
            pytest.fail(f"It did not end within {seconds:g} s:\n{self}")
        alive = psutil.wait_procs(list(self.seen), timeout=10.0)[1]
        assert not alive, f"{alive} outlived it"
        return code

    def __str__(self) -> str:
        return f"{self.host.name}: {self.out.read_text()}{self.err.read_text()}"


@pytest.fixture
def launch(tmp_path) -> Iterator[Callable[..., Launcher]]:
    launched: list[Launcher] = []

    def start(name: str, *arguments: str, **env: str) -> Launcher:
        launched.append(Launcher(tmp_path / name, *arguments, **env))
        return launched[-1]

    yield start
    for each in launched:
        if each.process.is_running():
            each.process.kill()
            each.process.wait(10.0)


@pytest.fixture(scope="session")
def xla_cache(tmp_path_factory) -> dict[str, str]:
    """The machines compile the same things."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("xla")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def free_ports() -> int:
    """The first of as many free ports, one after the other, as a run listens at."""
    return free_port(len(OPEN_GROUPS))


def steps_of(run_dir: pathlib.Path) -> dict[str, int]:
    """rank.incarnation -> environment steps, as the monitor counted them."""
    path = run_dir / "progress.json"
    if not path.exists():
        return {}
    return {name: counts[0] for name, counts in json.loads(path.read_text())["counts"].items()}


def train(launch: Any, port: int, steps: int, run_dir: pathlib.Path, *more: str, **env: str) -> Launcher:
    options = ["--topology", "distributed", "--num-actors", "1", "--listen", str(port), "--steps", str(steps)]
    options += ["--hang-timeout", "0"]  # some are stopped, for as long as it takes
    return launch("a", "train", *(more or SMALL), *options, "--run-dir", str(run_dir), "--quiet", "--json", **env)


def joined(
    launch: Any, port: int, run_dir: pathlib.Path, *more: str, rank: int = 1, name: str = "b", **env: str
) -> Any:
    """A launcher that has joined, and whose actor's steps are counted."""
    b = launch(name, "join", f"127.0.0.2:{port}", "--num-actors", "1", *more, **env)
    b.node("actor")
    b.node("guest")
    wait_until(lambda: steps_of(run_dir).get(f"{rank}.0"), lambda: f"Its steps are not counted:\n{b}")
    return b


@pytest.mark.system
def test_two_launchers_train_one_agent_over_tcp(launch, tmp_path, xla_cache):
    run_dir, port = tmp_path / "run", free_ports()
    a = train(launch, port, 20_000, run_dir, **xla_cache)
    b = launch("b", "join", f"127.0.0.2:{port}", "--num-actors", "1", **xla_cache)
    own = a.node("actor")
    wait_until(lambda: steps_of(run_dir).get("0.0"), lambda: f"No steps are counted:\n{a}")
    own.send_signal(signal.SIGSTOP)  # until the other has come, however slow it is
    try:
        wait_until(lambda: steps_of(run_dir).get("1.0"), lambda: f"Its steps are not counted:\n{b}")
        b.node("actor")
    finally:
        own.send_signal(signal.SIGCONT)
    assert a.end(120.0) == 0, a
    assert b.end(15.0) == 0, b
    assert "did not end within" not in f"{a}{b}"
    result, steps = json.loads(a.out.read_text().splitlines()[-1]), steps_of(run_dir)
    assert result["env_steps"] == sum(steps.values()) >= 20_000
    assert set(steps) == {"0.0", "1.0"} and steps["1.0"] > 0
    assert result["learner_steps"] > 0 and result["episodes"] == 2
    assert "[guest] The run is over." in b.err.read_text()


@pytest.mark.system
def test_a_run_goes_on_when_a_machine_that_joined_dies_and_takes_another(launch, tmp_path, xla_cache):
    run_dir, port = tmp_path / "run", free_ports()
    a = train(launch, port, 40_000, run_dir, **xla_cache)
    own = a.node("actor")
    own.send_signal(signal.SIGSTOP)
    try:
        b = joined(launch, port, run_dir, **xla_cache)
        b.process.send_signal(signal.SIGKILL)
        assert b.end(10.0) == -signal.SIGKILL
        joined(launch, port, run_dir, name="c", rank=2, **xla_cache).process.send_signal(signal.SIGKILL)
    finally:
        own.send_signal(signal.SIGCONT)
    assert a.end(180.0) == 0, a
    steps = steps_of(run_dir)
    assert all(steps[name] > 0 for name in ("0.0", "1.0", "2.0")), steps
    assert json.loads(a.out.read_text().splitlines()[-1])["env_steps"] == sum(steps.values()) >= 40_000


@pytest.mark.system
def test_a_run_that_is_stopped_ends_those_that_joined(launch, tmp_path, xla_cache):
    run_dir, port = tmp_path / "run", free_ports()
    a = train(launch, port, 100_000_000, run_dir, **xla_cache)
    b = joined(launch, port, run_dir, **xla_cache)
    a.process.send_signal(signal.SIGINT)
    assert b.end(10.0) == 0, b
    assert a.end(40.0) == 130, a


@pytest.mark.system
def test_a_run_that_vanishes_is_told_by_those_that_joined(launch, tmp_path, xla_cache):
    run_dir, port = tmp_path / "run", free_ports()
    a = train(launch, port, 100_000_000, run_dir, **xla_cache)
    wait_until(lambda: steps_of(run_dir), lambda: f"It does not begin:\n{a}")
    b = joined(launch, port, run_dir, "--deadline", "3", **xla_cache)
    a.process.send_signal(signal.SIGKILL)
    assert b.end(25.0) == 1, b
    assert f"The monitor of the run at 127.0.0.2:{port} did not answer attend() within 3 s" in b.err.read_text()


@pytest.mark.system
def test_ctrl_c_takes_a_machine_out_of_a_run(launch, tmp_path, xla_cache):
    run_dir, port = tmp_path / "run", free_ports()
    a = train(launch, port, 100_000_000, run_dir, **xla_cache)
    b = joined(launch, port, run_dir, **xla_cache)
    b.process.send_signal(signal.SIGINT)
    assert b.end(10.0) == 130, b
    joined(launch, port, run_dir, name="c", **xla_cache)  # with the rank that is free again
    wait_until(lambda: "1.1" in steps_of(run_dir), "the rank was not used again")
    a.process.send_signal(signal.SIGINT)
    assert a.end(40.0) == 130, a


@pytest.mark.system
def test_a_restarted_monitor_hears_of_those_that_joined(launch, tmp_path, xla_cache):
    run_dir, port = tmp_path / "run", free_ports()
    a = train(launch, port, 100_000_000, run_dir, **xla_cache)
    b = joined(launch, port, run_dir, **xla_cache)
    a.node("monitor").send_signal(signal.SIGKILL)
    before = steps_of(run_dir)["1.0"]
    wait_until(lambda: steps_of(run_dir)["1.0"] > before, lambda: f"Its steps are not counted any more:\n{a}{b}")
    joined(launch, port, run_dir, name="c", rank=2, **xla_cache)
    a.process.send_signal(signal.SIGINT)
    assert a.end(40.0) == 130, a
    assert b.end(15.0) == 0, b


@pytest.mark.system
def test_a_users_own_files_are_needed_on_one_machine_only(launch, tmp_path, xla_cache):
    run_dir, port, file = tmp_path / "run", free_ports(), tmp_path / "own.py"
    source = (ROOT / "examples" / "custom_agent.py").read_text()
    head, future, rest = source.partition("from __future__ import annotations\n")
    only_there = "import os\nimport gymnasium\nassert os.environ['MACHINE'] == 'a'\n"
    make_env = "\n\ndef make_env():\n    return gymnasium.make('CartPole-v1')\n"
    file.write_text(head + future + only_there + rest + make_env)
    options = ["--agent", f"{file}:Reinforce", "--env", f"{file}:make_env", "--eval-episodes", "2"]
    a = train(launch, port, 30_000, run_dir, *options, "--log-every", "200", MACHINE="a", **xla_cache)
    b = joined(launch, port, run_dir, MACHINE="b", **xla_cache)
    assert a.end(180.0) == 0, a
    assert b.end(15.0) == 0, b


@pytest.mark.system
def test_a_port_in_use_ends_the_command_before_anything_starts(launch, tmp_path):
    port = free_ports()
    with socket.create_server(("", port + 1)):
        a = train(launch, port, 1000, tmp_path / "run")
        assert a.end(60.0) == 2, a
    assert f"The learner cannot listen at port {port + 1}" in a.err.read_text()
    assert not (tmp_path / "run").exists()


@pytest.mark.system
def test_nobody_at_the_address_is_an_error_after_the_deadline(launch):
    b = launch("b", "join", f"127.0.0.2:{free_ports()}", "--deadline", "2")
    assert b.end(60.0) == 1, b
    assert "did not answer admit() within 2 s (nothing listens at 127.0.0.2:" in b.err.read_text()
