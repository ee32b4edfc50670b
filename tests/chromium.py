"""Start the browser for tests of HTML pages. Playwright controls the Chromium that is installed on this machine."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.extras import import_or_skip

import_or_skip("playwright", "pip install 'rlframe[test]'")
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None, reason="The page's tests need Chromium: apt-get install chromium, or make chromium"
)
DEADLINE = 60_000  # ms
expect.set_options(timeout=DEADLINE)


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """Start a browser for the tests of a module."""
    with sync_playwright() as driver:
        # Chromium needs these options if root runs it in a container.
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=2 * DEADLINE)
        yield browser
        browser.close()


@contextlib.contextmanager
def checked_pages(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Yield a function `new_page(url, **context_options)`, which returns a new page.

    At the end, check that no script of a page has failed, and that the pages have loaded files only from the origin of
    `url`.
    """
    contexts = []
    failures: list[str] = []
    requested: list[str] = []
    origins: list[str] = []

    def new_page(url: str, **options: Any) -> Page:
        context = browser.new_context(**options)
        context.set_default_timeout(DEADLINE)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.on("console", lambda message: failures.append(message.text) if "policy" in message.text.lower() else None)
        page.on("request", lambda request: requested.append(request.url))
        origins.append(url)
        return page

    yield new_page
    for context in contexts:
        context.close()
    assert failures == []
    assert [url for url in requested if not url.startswith((*origins, "data:"))] == []
