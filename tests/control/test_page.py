"""Tests of the live page in a real browser, with a scripted coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.extras import import_or_skip, needs

needs("trajectories")
import_or_skip("playwright", "pip install 'rlframe[test]'")
from playwright.sync_api import Browser, Page, expect

from rlframe.control.app import serve_control
from rlframe.coordinator.states import JobState
from rlframe.errors import PeerError
from tests.chromium import NEEDS_CHROMIUM, checked_pages, running_browser
from tests.control.scripted_coordinator import MAX_ACTORS

pytestmark = NEEDS_CHROMIUM
MARKUP = "<img/src=x/onerror=window.injected=true>"

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Yield a function that opens a page. See `checked_pages`."""
    with checked_pages(browser) as new_page:

        def open_page(url: str, path: str = "/", **options: Any) -> Page:
            page = new_page(url, **options)
            page.goto(url + path)
            return page

        yield open_page


def tile(page: Page, name: str) -> str | None:
    return page.locator(f"#tile-{name} .value").text_content()


def test_page_shows_the_job_and_its_workers(coordinator, server, open_page):
    coordinator.job["waits_for"] = "pacing"
    coordinator.workers[2].update(state="SUSPECT", silent_for=10.2, incarnation=3)
    page = open_page(server.url)
    expect(page.locator("#state")).to_have_text("RUNNING")
    expect(page.locator("#why")).to_contain_text(
        "The learner waits: the ratio of updates to environment steps is at its limit."
    )
    expect(page.locator("#name")).to_have_text("dqn on CartPole-v1")
    expect(page.locator("#steps")).to_have_text("24,000 of 100,000 environment steps (24 %)")
    expect(page.locator("#left")).to_have_text("about 40 s left")
    assert page.get_by_role("progressbar").get_attribute("aria-valuenow") == "24"
    shown = {name: tile(page, name) for name in ("env-steps-s", "updates-s", "return-in-training", "evaluation")}
    assert shown == {"env-steps-s": "1.9K", "updates-s": "118", "return-in-training": "231.5", "evaluation": "310.3"}
    assert (tile(page, "staleness"), tile(page, "restarts"), tile(page, "policy-version")) == ("1.5", "2", "150")
    rows = page.locator("#workers tbody tr")
    assert rows.locator("th").all_text_contents() == ["learner/0", "evaluator/0", "collector/0", "collector/1"]
    suspect = rows.nth(2).locator("td").all_text_contents()
    assert suspect[:7] == ["SUSPECT", "3", "collector-task-0", "10 s", "12,000", "950", "229"]
    assert page.locator("#tasks tbody tr").count() == 3
    tasks = page.locator("#tasks tbody tr td:last-child").all_text_contents()
    assert tasks[1:] == ["gravity 12, epsilon 0.5"] * 2
    assert "14,000" in (page.locator("#replay").text_content() or "")
    assert "dropped3" in (page.locator("#accounts").text_content() or "")


@pytest.mark.system
def test_plot_shows_points_and_their_values(coordinator, server, open_page):
    coordinator.returns, coordinator.evaluations = [[1000, 10.0], [2000, 40.0], [3000, 25.5]], [[2500, 33.0, 17]]
    page = open_page(server.url)
    curve = page.locator("#plot polyline.curve").first
    points = [tuple(map(float, point.split(","))) for point in (curve.get_attribute("points") or "").split()]
    (x1, y1), (x2, y2), (x3, y3) = points
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2) and x1 < x2  # linear axis; larger values are further right
    assert (y1 - y2) / (y3 - y2) == pytest.approx(30.0 / 14.5, rel=0.02) and y2 < y3 < y1
    assert page.locator("#plot circle.mark").count() == 1
    assert {"0", "1K", "2K", "3K", "20", "40"} <= set(page.locator("#plot text").all_text_contents())
    page.locator("#plot").hover(position={"x": x2 + 1, "y": y2})
    expect(page.locator("#pointed")).to_have_text("2,000 steps: 40 (training)")
    page.locator("#plot").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#pointed")).to_have_text("2,500 steps: 33 (evaluation of version 17)")
    coordinator.returns = [*coordinator.returns, [4000, 80.0]]
    told = "Returns over environment steps: 4 mean returns in training, the last one 80 at 4,000 steps; 1 evaluation."
    expect(page.locator("#plot")).to_have_attribute("aria-label", f"{told} Use the arrow keys to read single points.")


@pytest.mark.system
def test_message_of_a_refused_evaluation_request_is_shown(coordinator, server, open_page):
    coordinator.evaluates = True
    page = open_page(server.url)
    expect(page.locator("#state")).to_have_text("RUNNING")
    page.get_by_role("button", name="Evaluate now").click()
    expect(page.locator("#said")).to_have_text("An evaluation is already in progress.")


def test_buttons_call_the_coordinator(coordinator, server, open_page):
    page = open_page(server.url)
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#state")).to_have_text("PAUSED")
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("#state")).to_have_text("RUNNING")
    page.get_by_role("button", name="Evaluate now").click()
    page.get_by_role("button", name="Checkpoint").click()
    page.get_by_role("button", name="Add a collector").click()
    expect(page.locator("#workers tbody tr")).to_have_count(5)
    page.get_by_role("button", name="Remove a collector").click()
    expect(page.locator("#workers tbody tr")).to_have_count(4)
    called = [call for call in coordinator.calls if call[0] != "scale"]
    assert called == [("pause",), ("unpause",), ("evaluate_now",), ("checkpoint",)]
    assert [call for call in coordinator.calls if call[0] == "scale"] == [
        ("scale", "collector", 3),
        ("scale", "collector", 2),
    ]


@pytest.mark.system
def test_scale_buttons_are_disabled_at_the_limits(coordinator, server, open_page):
    coordinator.scale("collector", MAX_ACTORS)
    page = open_page(server.url)
    expect(page.locator("#wanted")).to_have_text(str(MAX_ACTORS))
    expect(page.get_by_role("button", name="Add a collector")).to_be_disabled()
    coordinator.scale("collector", 1)
    expect(page.get_by_role("button", name="Remove a collector")).to_be_disabled()
    expect(page.get_by_role("button", name="Add a collector")).to_be_enabled()


@pytest.mark.system
def test_stop_button_requires_confirmation(coordinator, server, open_page):
    page = open_page(server.url)
    page.get_by_role("button", name="Stop…").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    page.get_by_role("button", name="Keep it running").click()
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert coordinator.calls == []
    page.get_by_role("button", name="Stop…").click()
    page.get_by_label("Reason").fill("good enough")
    page.get_by_role("button", name="Stop the job").click()
    expect(page.locator("#state")).to_have_text("DRAINING")
    assert coordinator.calls == [("cancel", "good enough")]
    expect(page.get_by_role("button", name="Pause")).to_be_disabled()


@pytest.mark.system
def test_message_of_a_refused_checkpoint_request_is_shown(coordinator, server, open_page):
    page = open_page(server.url)
    expect(page.locator("#state")).to_have_text("RUNNING")
    coordinator.checkpoint = lambda: coordinator.unpause()
    page.get_by_role("button", name="Checkpoint").click()
    expect(page.locator("#said")).to_have_text("The job is not paused.")


@pytest.mark.system
def test_page_shows_problems_of_the_job_and_the_operator(coordinator, server, open_page):
    page = open_page(server.url)
    coordinator.become(JobState.DEGRADED, "The learner was lost.")
    coordinator.operator.update(connected=False, problem="connection refused")
    expect(page.locator("#state")).to_have_text("DEGRADED")
    expect(page.locator("#why")).to_have_text("The learner was lost.")
    expect(page.locator("#problem")).to_contain_text("The operator (local) cannot be reached: connection refused.")
    coordinator.become(JobState.FAILED, "The learner was lost 4 times.")
    expect(page.locator("#over")).to_have_text("The job failed: The learner was lost 4 times.")
    expect(page.get_by_role("button", name="Evaluate now")).to_be_disabled()


@pytest.mark.system
def test_page_keeps_the_last_status_while_the_coordinator_is_unreachable(coordinator, server, open_page):
    page = open_page(server.url)
    expect(page.locator("#state")).to_have_text("RUNNING")
    coordinator.away = PeerError("It did not answer.")
    expect(page.get_by_role("alert")).to_contain_text("The run has been unreachable since")
    expect(page.get_by_role("alert")).to_contain_text("It did not answer.")
    expect(page.locator("#connection")).to_have_text("unreachable")
    expect(page.locator("#workers tbody tr")).to_have_count(4)
    expect(page.get_by_role("button", name="Pause")).to_be_disabled()
    coordinator.happen("coordinator", "It was started again.")
    coordinator.away = None
    expect(page.locator("#connection")).to_have_text("connected")
    expect(page.get_by_role("button", name="Pause")).to_be_enabled()
    expect(page.locator("#events li").last).to_contain_text("It was started again.")


@pytest.mark.system
def test_log_follows_new_events_until_the_user_scrolls_up(coordinator, server, open_page):
    for i in range(100):
        coordinator.happen("worker", f"number {i}")
    page = open_page(server.url)
    events = page.locator("#events")
    expect(events.locator("li")).to_have_count(101)
    expect(events).to_be_visible()  # the page shows the list after its first status, and then scrolls to the end
    at_end = "(list) => list.scrollHeight - list.scrollTop - list.clientHeight < 24"
    page.wait_for_function(f"() => ({at_end})(document.getElementById('events'))")
    events.evaluate("(list) => { list.scrollTop = 0; }")
    page.wait_for_function("() => !following")
    coordinator.happen("worker", "one more")
    expect(page.get_by_role("button", name="1 new event")).to_be_visible()
    assert events.evaluate("(list) => list.scrollTop") == 0
    page.get_by_role("button", name="1 new event").click()
    coordinator.happen("worker", "the last")
    expect(events.locator("li").last).to_contain_text("the last")
    assert events.evaluate(at_end)
    numbers = events.locator("li span:last-child").all_text_contents()
    assert numbers[1:4] == ["number 0", "number 1", "number 2"] and len(numbers) == 103  # no duplicates


def test_html_in_the_status_is_shown_as_text(coordinator, server, open_page):
    coordinator.job.update(agent=MARKUP, reason=MARKUP, run_dir=MARKUP)
    coordinator.workers.append(coordinator.worker("collector", 2, worker_id=MARKUP, host=MARKUP, task_id=MARKUP))
    coordinator.operator.update(connected=False, problem=MARKUP)
    coordinator.happen(MARKUP, MARKUP)
    page = open_page(server.url)
    expect(page.locator("#events li").last.locator("span").last).to_have_text(MARKUP)
    expect(page.locator("#why")).to_have_text(MARKUP)
    expect(page.locator("#problem")).to_contain_text(MARKUP)
    expect(page.locator("#workers tbody th").last).to_have_text(MARKUP)
    assert page.locator("img").count() == 0
    assert page.evaluate("window.injected") is None


@pytest.mark.system
def test_page_reads_the_token_from_the_form_or_the_url(coordinator, tmp_path, open_page):
    (tmp_path / "token").write_text("secret")
    with serve_control(coordinator, port=0, token_file=str(tmp_path / "token")) as server:
        page = open_page(server.url)
        for token, told in (("wrong", "did not accept this token"), ("secret", None)):
            page.get_by_label("Token").fill(token)
            page.get_by_role("button", name="Open").click()
            if told:
                expect(page.locator("#asked")).to_contain_text(told)
        expect(page.locator("#state")).to_have_text("RUNNING")
        expect(page.locator("#events li")).to_have_count(1)
        page.get_by_role("button", name="Pause").click()
        expect(page.locator("#state")).to_have_text("PAUSED")
        linked = open_page(server.url, "/#token=secret")
        expect(linked.locator("#state")).to_have_text("PAUSED")
        assert linked.url == server.url + "/"  # the token is removed from the address bar


@pytest.mark.system
@pytest.mark.parametrize("width", [360, 1200])
def test_page_fits_the_window_width(coordinator, server, open_page, width):
    coordinator.workers.append(coordinator.worker("collector", 2, host="a-host-with-a-long-name-" * 4))
    coordinator.happen("worker", "x" * 500)
    coordinator.job["reason"] = "y" * 300
    page = open_page(server.url, viewport={"width": width, "height": 900})
    expect(page.locator("#workers tbody tr")).to_have_count(5)
    expect(page.locator("#events li")).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth") == width
