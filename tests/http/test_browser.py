"""Test with a real browser that pages of another origin cannot change the three services."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.extras import import_or_skip, needs

needs("trajectories", "envs")
import_or_skip("playwright", "pip install 'rlframe[test]'")
from playwright.sync_api import Browser, Page

from tests.chromium import DEADLINE, NEEDS_CHROMIUM, running_browser
from tests.http.services import COMPLETION, control, policy, trajectories
from tests.trajectories.serving import outer_address

pytestmark = [NEEDS_CHROMIUM, pytest.mark.system]

# JavaScript that sends requests in every way that a browser permits, and waits for each response or error.
FIRE = """async ([images, posts]) => {
  const image = url => new Promise(done => {
    const element = new Image();
    element.onload = element.onerror = done;
    element.referrerPolicy = 'no-referrer';
    element.src = url;
  });
  const script = url => new Promise(done => {
    const element = document.createElement('script');
    element.onload = element.onerror = done;
    element.src = url;
    document.head.append(element);
  });
  const frame = url => new Promise(done => {
    const element = document.createElement('iframe');
    element.onload = element.onerror = done;
    element.src = url;
    document.body.append(element);
  });
  const form = url => new Promise(done => {
    const target = document.createElement('iframe'), element = document.createElement('form');
    target.name = 'target' + Math.random();
    target.onload = done;
    element.method = 'POST', element.action = url, element.target = target.name;
    document.body.append(target, element);
    element.submit();
  });
  const blind = ([url, body]) => fetch(url, {method: 'POST', mode: 'no-cors', body}).catch(() => {});
  for (const url of images) { await image(url); await script(url); await frame(url); await blind([url, '{}']); }
  for (const post of posts) { await blind(post); await form(post[0]); }
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[int]:
    """Serve an empty page at every path. Yield the port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>elsewhere</title><body></body>")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def page_of(browser: Browser, url: str) -> Iterator[Page]:
    context = browser.new_context()
    context.set_default_timeout(DEADLINE)
    page = context.new_page()
    page.goto(url)
    yield page
    context.close()


# The first page is on the same site (same host, other port). The second page is on another site.
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_requests_from_a_page_of_another_origin_change_nothing(browser, elsewhere, host):
    with trajectories() as groups, policy() as model, control() as run:
        images = [groups.url + path for path in ("/reset_data", "/batch", "/runs/default/batch")]
        images += [run.url + "/pause", run.url + "/stop", model.url + "/v1/completions"]
        posts = [(groups.url + path, "{}") for path in ("/reset_data", "/pause", "/register")]
        posts += [(run.url + path, "{}") for path in ("/pause", "/stop", "/checkpoint", "/restore")]
        posts += [(model.url + "/v1/completions", json.dumps(COMPLETION))]
        before = [target.state() for target in (groups, model, run)]
        with page_of(browser, f"http://{host}:{elsewhere}") as page:
            page.evaluate(FIRE, [images, posts])
        assert [target.state() for target in (groups, model, run)] == before
        # The services answer the same requests if programs send them.
        assert len(httpx.get(groups.url + "/batch", timeout=60.0).json()["batch"]) == 2
        assert httpx.get(groups.url + "/reset_data", timeout=60.0).status_code == 200
        assert httpx.post(run.url + "/pause", timeout=60.0).status_code == 200 and run.state() == [("pause",)]


def test_requests_without_sec_fetch_site_change_nothing(browser, elsewhere):
    """Browsers send Sec-Fetch-Site only to loopback and https addresses. They send no Origin header for an image."""
    with trajectories("0.0.0.0", no_token=True) as target:
        before = target.state()
        for address in (outer_address(), "0.0.0.0"):
            url = f"http://{address}:{target.port}"
            with page_of(browser, f"http://localhost:{elsewhere}") as page:
                page.evaluate(FIRE, [[url + "/reset_data", url + "/batch"], [(url + "/pause", "{}")]])
            assert target.state() == before
        with page_of(
            browser, f"http://{outer_address()}:{target.port}"
        ) as page:  # the service's own page works at this address
            page.locator("#tiles").wait_for()
            assert page.evaluate("() => fetch('/report').then(answer => answer.status)") == 200
            pause = "() => fetch('/pause', {method: 'POST', body: '{}'}).then(answer => answer.status)"
            assert page.evaluate(pause) == 200


def test_link_on_another_site_opens_only_the_live_page(browser, elsewhere):
    with trajectories() as target, page_of(browser, f"http://localhost:{elsewhere}") as page:
        before = target.state()
        follow = """url => { const link = document.createElement('a'); link.href = url; document.body.append(link);
                             link.click(); }"""
        with page.expect_navigation() as navigation:
            page.evaluate(follow, target.url + "/reset_data")
        assert navigation.value.status == 403 and target.state() == before
        page.goto(f"http://localhost:{elsewhere}")
        with page.expect_navigation() as navigation:
            page.evaluate(follow, target.url + "/")
        assert navigation.value.status == 200
        assert page.evaluate("() => fetch('/report').then(answer => answer.status)") == 200
