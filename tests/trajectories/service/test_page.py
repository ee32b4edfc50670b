"""Tests of the service's live page in a real browser, with a real service."""

from __future__ import annotations

import pathlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.extras import import_or_skip, needs

needs("trajectories", "tokenizers")
import_or_skip("playwright", "pip install 'rlframe[test]'")
import tokenizers
from playwright.sync_api import Browser, Page, expect

from tests.chromium import NEEDS_CHROMIUM, checked_pages, running_browser
from tests.trajectories.api import Api
from tests.trajectories.serving import ServiceProcess, running_service
from tests.waiting import wait_until

pytestmark = [NEEDS_CHROMIUM, pytest.mark.system]
MARKUP = "<img/src=x/onerror=window.injected=true>"
WEIGHTS = (("math", 1.0), ("code", 3.0))
WORDS = ["[UNK]", "the", "sum", "is", "42", MARKUP]

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    vocabulary = {word: token for token, word in enumerate(WORDS)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")).save(str(file))
    return file


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, tokenizer: pathlib.Path) -> Iterator[ServiceProcess]:
    """Run one service for most tests. Each test uses a different run name."""
    with running_service(
        tmp_path_factory.mktemp("service"), "--store", "memory", "--tokenizer", str(tokenizer)
    ) as service:
        yield service


@pytest.fixture(scope="module")
def client(service: ServiceProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=60.0) as client:
        yield client


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Return a function that opens a page; see `checked_pages`."""
    with checked_pages(browser) as new_page:

        def open_page(url: str, run: str | None = None, clock: bool = False, **options: Any) -> Page:
            page = new_page(url, **options)
            if clock:  # the page's time advances only when the test calls `run_for`
                page.clock.install()
                page.clock.pause_at(time.time() + 1)
            page.goto(url + (f"/?run={run}" if run else "/"))
            return page

        yield open_page


def row_of(page: Page, env: str) -> dict[str, str]:
    """Return an environment's row of the table as a dict from column header to text."""
    headers = page.locator("thead th").all_text_contents()
    cells = page.locator("#envs tr", has_text=env).locator("th, td").all_text_contents()
    return dict(zip(headers, (cell.strip() for cell in cells)))


def test_browsers_get_page_and_other_clients_get_json(client: httpx.Client) -> None:
    page = client.get("/", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"(src|href)=\"?(https?:)?//", page.text)
    for accept in ("*/*", "application/json"):
        assert set(client.get("/", headers={"Accept": accept}).json()) == {"message"}


@pytest.mark.parametrize(("steps", "shown"), [(1500, "of 1,500"), (2**31 - 1, "no last step")])
def test_page_shows_last_step_of_run_or_that_run_has_none(
    service: ServiceProcess, client: httpx.Client, open_page: Open, steps: int, shown: str
) -> None:
    Api(client, f"steps-{steps}").started(num_steps=steps)
    page = open_page(service.url, f"steps-{steps}")
    expect(page.locator("#tiles")).to_contain_text(shown)


def test_environments_and_numbers_are_shown(service: ServiceProcess, client: httpx.Client, open_page: Open) -> None:
    api = Api(client, "numbers").started(max_staleness=9)
    math, code = (api.join(desired_name=name, group_size=4, weight=weight)["env_id"] for name, weight in WEIGHTS)
    lonely = api.join(desired_name="lonely", group_size=3)["env_id"]
    api.post("/disconnect-env", {"env_id": api.join(desired_name="gone")["env_id"]})
    api.post("/policy-version", {"policy_version": 7})
    for env in (math, code, code):
        api.send(1, sequences=4, env_id=env, policy_version=5)
    api.send(1, sequences=2, env_id=lonely)
    api.send(1, sequences=3)
    assert api.get("/batch").json()["batch"][0]["env_id"] == math
    page = open_page(service.url, "numbers")

    expect(page.locator("#envs tr")).to_have_count(4)
    tiles = dict(zip(page.locator("dt").all_text_contents(), page.locator("dd.value").all_text_contents()))
    assert tiles["Step"] == "4" and tiles["Batches served"] == "1"
    assert tiles["Queue"] == "3 groups" and tiles["Environments live"] == "3" and tiles["Staleness"] == "2"
    math_row = row_of(page, "math_0")
    shown = [math_row[name] for name in ("State", "Served", "Weight", "Queue", "Oldest")]
    assert shown == ["live", "100 %", "0.2", "0 groups", "\N{EN DASH}"]
    code_row = row_of(page, "code_0")
    assert (code_row["Weight"], code_row["Queue"], code_row["Served"]) == ("0.6", "2 groups", "0 %")
    assert re.fullmatch(r"\d+ (s|min)", code_row["Oldest"])
    assert row_of(page, "gone_0")["State"] == "disconnected"
    waiting = page.locator("#waiting li").all_text_contents()
    assert any(one.startswith("lonely_0: 2 sequences in undersized groups wait for others") for one in waiting)
    assert page.locator("#project").text_content() == "project / group"
    assert page.get_by_role("columnheader").count() == 8 and page.get_by_role("rowheader").count() == 4

    # The page computes rates from two successive polls.
    expect(page.locator("#envs tr").first.locator("td").nth(1)).to_have_text("0")
    api.send(*range(5), sequences=4, env_id=math)
    expect(page.locator("#envs tr").first.locator("td").nth(2)).to_have_text(re.compile(r"^[1-9]|^0\.\d"))
    expect(page.locator("#envs tr").nth(1).locator("td").nth(2)).to_have_text("0")


def test_html_in_trajectory_is_shown_as_text(service: ServiceProcess, client: httpx.Client, open_page: Open) -> None:
    api = Api(client, "html").started(wandb_project=MARKUP)
    env = api.join(desired_name=MARKUP, group_size=1)["env_id"]
    messages = [[{"role": MARKUP, "content": MARKUP}]]
    sent = {"tokens": [[5, 1]], "masks": [[5, 1]], "scores": [1.0], "env_id": env, "messages": messages}
    assert api.post("/scored_data", sent).status_code == 200
    page = open_page(service.url, "html")
    page.locator("summary").click()
    expect(page.locator(".message b")).to_have_text(MARKUP)
    expect(page.locator(".message pre")).to_have_text(MARKUP)
    expect(page.locator(".tokens")).to_have_text(f"{MARKUP} the")
    expect(page.locator("#envs th")).to_have_text(f"{MARKUP}_0")
    expect(page.locator("#project")).to_have_text(f"{MARKUP} / group")
    expect(page.locator("h3")).to_have_text(f"{MARKUP}_0")
    assert page.locator("img").count() == 0
    assert page.evaluate("window.injected") is None


def test_masked_tokens_are_gray(service: ServiceProcess, client: httpx.Client, open_page: Open) -> None:
    sent = {"tokens": [[1, 2, 3, 4]], "masks": [[-100, -100, 3, 4]], "scores": [0.25], "policy_version": 3}
    assert Api(client, "masks").post("/scored_data", sent).status_code == 200
    page = open_page(service.url, "masks")
    expect(page.locator(".group .muted").first).to_have_text("policy version 3")
    expect(page.locator("summary .score")).to_have_text("score 0.25")
    expect(page.locator("summary .length")).to_have_text("4 tokens, 2 trained on")
    page.locator("summary").click()
    masked, trained = page.locator(".tokens .masked"), page.locator(".tokens .trained")
    assert (masked.text_content(), trained.text_content()) == ("the sum", " is 42")
    look = "(element) => [getComputedStyle(element).color, getComputedStyle(element).backgroundColor]"
    assert masked.evaluate(look)[0] != trained.evaluate(look)[0]
    assert masked.evaluate(look)[1] != trained.evaluate(look)[1]


def test_open_trajectory_is_not_replaced_until_user_follows_new_trajectories(
    service: ServiceProcess, client: httpx.Client, open_page: Open
) -> None:
    api = Api(client, "reading")
    api.send(1, sequences=1, policy_version=1)
    page = open_page(service.url, "reading")
    page.locator("summary").click()
    api.send(2, sequences=1, policy_version=2)
    expect(page.locator("#tile-queue .value")).to_have_text("2 groups")
    assert page.locator("details[open]").count() == 1 and page.locator("article").count() == 1
    page.get_by_label("Follow new trajectories").check()
    expect(page.locator("article")).to_have_count(2)
    expect(page.locator("article").first).to_contain_text("policy version 2")


def test_pause_and_resume_buttons_work(service: ServiceProcess, client: httpx.Client, open_page: Open) -> None:
    api = Api(client, "pausing").started()
    page = open_page(service.url, "pausing")
    page.get_by_role("button", name="Pause environments").click()
    expect(page.locator("#paused")).to_be_visible()
    assert api.get("/status").json()["paused"] is True
    assert Api(client).get("/status").json()["paused"] is False  # another run
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("#paused")).to_be_hidden()
    assert api.get("/status").json()["paused"] is False


def test_another_run_can_be_selected(service: ServiceProcess, client: httpx.Client, open_page: Open) -> None:
    for name in ("one", "two"):
        Api(client, name).started().join(desired_name=f"env-of-{name}")
    page = open_page(service.url, "one")
    expect(page.locator("#envs th")).to_have_text("env-of-one_0")
    page.get_by_label("Run").select_option("two")
    expect(page.locator("#envs th")).to_have_text("env-of-two_0")
    assert page.url == f"{service.url}/?run=two"


def test_polling_stops_while_tab_is_hidden(service: ServiceProcess, open_page: Open) -> None:
    page = open_page(service.url, clock=True)
    expect(page.locator("#state")).to_have_text("connected")
    reports: list[str] = []
    page.on("request", lambda request: reports.append(request.url) if "report" in request.url else None)
    run_until_report(page, reports)
    show = "(hidden) => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
    show += " document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(show, True)
    before = len(reports)
    page.clock.run_for(60_000)
    assert len(reports) - before <= 1  # One request can already be running when the tab is hidden.
    with page.expect_response("**/report"):
        page.evaluate(show, False)
    run_until_report(page, reports)


def run_until_report(page: Page, reports: list[str]) -> None:
    """Advance the page's clock until it requests a report. The page sets its timer only after an earlier response."""
    before = len(reports)

    def advance() -> bool:
        page.clock.run_for(1000)
        return len(reports) > before

    wait_until(advance, "no request of a report")


def test_page_reports_unreachable_service(tmp_path: pathlib.Path, open_page: Open) -> None:
    with running_service(tmp_path) as service:
        with httpx.Client(base_url=service.url, timeout=60.0) as client:
            Api(client).started().join(desired_name="math")
        page = open_page(service.url)
        expect(page.locator("#envs th")).to_have_text("math_0")
        service.kill()
        expect(page.get_by_role("alert")).to_contain_text("The service has been unreachable since")
        expect(page.locator("#state")).to_have_text("unreachable")
        service.start()
        expect(page.locator("#state")).to_have_text("connected")
        expect(page.locator("#unreachable")).to_be_hidden()
        expect(page.locator("#envs th")).to_have_text("math_0")


def test_page_asks_for_token(tmp_path: pathlib.Path, open_page: Open) -> None:
    (tmp_path / "token").write_text("secret\n")
    with running_service(tmp_path, "--store", "memory", "--token-file", str(tmp_path / "token")) as service:
        for path in ("report", "previews", "metrics"):
            assert httpx.get(f"{service.url}/{path}", timeout=60.0).status_code == 401
        page = open_page(service.url)
        for token, message in (("wrong", "did not accept this token"), ("secret", None)):
            page.get_by_label("Token").fill(token)
            page.get_by_role("button", name="Open").click()
            if message:
                expect(page.locator("#asked")).to_contain_text(message)
        expect(page.locator("#tiles")).to_be_visible()
        page.reload()  # The page has stored the token for this tab.
        expect(page.locator("#tiles")).to_be_visible()
        assert page.evaluate("[sessionStorage.getItem('token'), localStorage.length]") == ["secret", 0]


@pytest.mark.system
@pytest.mark.parametrize("width", [390, 1200])
def test_page_is_not_wider_than_window(
    service: ServiceProcess, client: httpx.Client, open_page: Open, width: int
) -> None:
    api = Api(client, f"wide-{width}").started()
    api.join(desired_name="a-name-that-is-long-" * 8)
    api.send(1, env_id=0, messages=[[{"role": "user", "content": "x" * 500}]] * 2)
    page = open_page(service.url, f"wide-{width}", viewport={"width": width, "height": 900})
    page.locator("summary").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") == width
