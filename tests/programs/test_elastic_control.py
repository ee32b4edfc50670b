"""Elastic runs as people steer them: by the queue of `rlframe serve coordinator`, and by the page in a browser."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.extras import import_or_skip, needs

needs("launchpad", "trajectories")
import_or_skip("playwright", "pip install 'rlframe[test]'")
from playwright.sync_api import expect

from rlframe.cli import main
from rlframe.coordinator.control.client import ControlClient
from rlframe.errors import PeerError, UnavailableError
from tests.chromium import NEEDS_CHROMIUM, checked_pages, running_browser
from tests.programs.elastic import ElasticProgram
from tests.programs.running import ROOT

pytestmark = pytest.mark.system
SPEC = {"agent": "dqn", "env": "CartPole-v1", "num_actors": 1, "max_actors": 2, "eval_episodes": 2}


class Service:
    """`rlframe serve coordinator` on a folder. As a context it ends with nothing left of it and its run."""

    def __init__(self, runs: pathlib.Path) -> None:
        self.runs = runs
        self._seen: set[psutil.Process] = set()
        self.start()

    def start(self) -> None:
        """Starts it, or starts it again."""
        command = [sys.executable, "-m", "rlframe", "serve", "coordinator", "--port", "0", "--runs", str(self.runs)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("Coordinator at ")

    def ask(self, what: Callable[[ControlClient], Any]) -> Any:
        """What the service answers; None where the job that it asks for that does not answer now."""
        try:
            with ControlClient.of_queue(self.runs) as client:
                return what(client)
        except (PeerError, UnavailableError):
            return None

    def command(self, *arguments: str) -> str:
        """What a command of `rlframe` prints of it."""
        command = [sys.executable, "-m", "rlframe", *arguments, "--runs", str(self.runs)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60.0)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def job(self, job: str) -> dict[str, Any]:
        """What the queue knows of a job."""
        with ControlClient.of_queue(self.runs) as client:
            return client.get(f"/jobs/{job}")

    def wait_until(self, condition: Callable[[], Any], seconds: float = 150.0) -> None:
        """Waits for a condition."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.ask(lambda client: client.status())
            time.sleep(0.1)

    def is_at_work(self, collectors: int) -> bool:
        """Whether so many collectors of the job that runs are at work."""
        status = self.ask(lambda client: client.status()) or {}
        workers = status.get("workers", [])
        self._seen |= {psutil.Process(it["pid"]) for it in workers if it["pid"] and psutil.pid_exists(it["pid"])}
        return [it["state"] for it in workers if it["role"] == "collector"] == ["BUSY"] * collectors

    def __enter__(self) -> Service:
        return self

    def __exit__(self, kind: Any, *exc: Any) -> None:
        self.process.terminate()
        self.process.wait(30.0)
        if kind is not None:
            for job in json.loads((self.runs / "jobs.json").read_text())["jobs"]:
                if job["pid"] > 0 and psutil.pid_exists(job["pid"]):
                    os.kill(job["pid"], signal.SIGKILL)
            return
        _, alive = psutil.wait_procs(self._seen, 10.0)
        assert not alive


def test_a_queue_runs_what_is_submitted_and_survives_its_own_death(tmp_path: pathlib.Path) -> None:
    with Service(tmp_path / "runs") as service:
        first = service.ask(lambda client: client.submit({**SPEC, "steps": 30_000}))["id"]
        second = service.ask(lambda client: client.submit({**SPEC, "steps": 30_000}))["id"]
        service.wait_until(lambda: service.is_at_work(1))
        assert "running" in service.command("status") and "dqn on CartPole-v1" in service.command("status")
        service.command("scale", "collector", "2")
        service.wait_until(lambda: service.is_at_work(2))
        assert service.job(second)["state"] == "queued"
        with ControlClient.of_queue(service.runs) as client:
            client.post(f"/jobs/{second}/cancel", {"reason": "not wanted"})
        pid = service.job(first)["pid"]

        service.process.kill()
        service.process.wait()
        assert psutil.pid_exists(pid)
        service.start()
        assert (service.job(first)["state"], service.job(first)["pid"]) == ("running", pid)
        service.wait_until(lambda: service.is_at_work(2))
        assert '"scaling": "manual"' in json.dumps(json.loads(service.command("status", "--json")))

        service.wait_until(lambda: service.job(first)["state"] == "done")
        assert (service.job(first)["sessions"], service.job(second)["state"]) == (1, "cancelled")
        result = json.loads((tmp_path / "runs" / first / "result.json").read_text())
        assert result["env_steps"] >= 30_000 and result["episodes"] == 2
        assert not (tmp_path / "runs" / second / "config.json").exists() or not service.job(second)["sessions"]


@NEEDS_CHROMIUM
def test_the_page_shows_a_real_run_and_steers_it(tmp_path: pathlib.Path) -> None:
    few = ["--agent", "dqn", "--env", "CartPole-v1", "--num-actors", "1", "--max-actors", "2", "--log-every", "300"]
    with (
        ElasticProgram(tmp_path / "run", *few, "--steps", "100000000") as program,
        running_browser() as browser,
        checked_pages(browser) as new_page,
    ):
        program.wait_for_collectors(1)
        control = json.loads((tmp_path / "run" / "control.json").read_text())
        token = pathlib.Path(control["token_file"]).read_text().strip()
        page = new_page(control["url"], viewport={"width": 1280, "height": 1400})
        page.goto(f"{control['url']}/#token={token}")
        expect(page.locator("#state")).to_have_text("RUNNING")
        expect(page.locator("#name")).to_have_text("dqn on CartPole-v1")
        curve = page.locator("#plot polyline.curve").first
        expect(curve).to_have_attribute("points", re.compile(r"(\S+,\S+\s*){5,}"))
        page.get_by_role("button", name="One collector more").click()
        program.wait_for_collectors(2)
        rows = page.locator("#workers tbody tr th")
        expect(rows).to_have_text(["learner/0", "collector/0", "collector/1"])
        page.get_by_role("button", name="Pause").click()
        program.wait_for(lambda status: status["job"]["state"] == "PAUSED")
        expect(page.locator("#state")).to_have_text("PAUSED")
        look(page, "paused")
        page.get_by_role("button", name="Resume").click()
        program.wait_for(lambda status: status["job"]["state"] == "RUNNING")
        expect(page.locator("#state")).to_have_text("RUNNING")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            look(page, scheme)
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        look(page, "phone")
        program.ask(lambda client: client.cancel("seen enough"))
        code, _ = program.finish()
    assert code == 0


def look(page: Any, name: str) -> None:
    """A picture for whoever wants to see it: with RLFRAME_PICTURES, in that folder."""
    folder = os.environ.get("RLFRAME_PICTURES")
    if folder:
        page.screenshot(path=str(pathlib.Path(folder) / f"real-{name}.png"), full_page=True)


def test_a_run_whose_control_cannot_listen_leaves_nothing_behind(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--agent", "dqn", "--topology", "elastic", "--quiet", "--run-dir", str(tmp_path / "run")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([*command, "--http", str(port)]) == 2
    assert f"Port {port} of 127.0.0.1 is in use. Choose another one" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()  # so that the same command, with another port, begins
