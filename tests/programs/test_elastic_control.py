"""A browser shows the live page of an elastic run, and controls the run."""

from __future__ import annotations

import json
import os
import pathlib
import re
import socket
from typing import Any

import pytest

from tests.extras import import_or_skip, needs

needs("trajectories")
import_or_skip("playwright", "pip install 'rlframe[test]'")
from playwright.sync_api import expect

from rlframe.cli import main
from tests.chromium import NEEDS_CHROMIUM, checked_pages, running_browser
from tests.programs.elastic_program import ElasticProgram

pytestmark = pytest.mark.system


@NEEDS_CHROMIUM
def test_page_shows_and_controls_a_real_run(tmp_path: pathlib.Path) -> None:
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
        page.get_by_role("button", name="Add a collector").click()
        program.wait_for_collectors(2)
        rows = page.locator("#workers tbody tr th")
        expect(rows).to_have_text(["learner/0", "collector/0", "collector/1"])
        page.get_by_role("button", name="Pause").click()
        program.wait_for(lambda status: status["job"]["state"] == "PAUSED")
        expect(page.locator("#state")).to_have_text("PAUSED")
        take_screenshot(page, "paused")
        page.get_by_role("button", name="Resume").click()
        program.wait_for(lambda status: status["job"]["state"] == "RUNNING")
        expect(page.locator("#state")).to_have_text("RUNNING")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            take_screenshot(page, scheme)
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        take_screenshot(page, "phone")
        program.call(lambda client: client.cancel("seen enough"))
        code, _ = program.finish()
    assert code == 0


def take_screenshot(page: Any, name: str) -> None:
    """Save a screenshot in the folder RLFRAME_PICTURES, if this environment variable is set."""
    folder = os.environ.get("RLFRAME_PICTURES")
    if folder:
        page.screenshot(path=str(pathlib.Path(folder) / f"real-{name}.png"), full_page=True)


def test_run_with_unavailable_http_port_leaves_no_directory(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--agent", "dqn", "--topology", "elastic", "--quiet", "--run-dir", str(tmp_path / "run")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([*command, "--http", str(port)]) == 2
    assert f"Port {port} of 127.0.0.1 is in use. Choose another port" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()  # so the same command works with another port
