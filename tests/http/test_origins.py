"""Who may call a service: pages that it served itself, and programs."""

from __future__ import annotations

import asyncio

import pytest

from rlframe.http.origins import SameOrigin


def status_of(**headers: str) -> int:
    """What a request with these headers is answered with."""
    sent = []

    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    named = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": named}
    asyncio.run(SameOrigin(application, hosts=["Train.example"])(scope, None, send))
    return sent[0]["status"]


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8765", "localhost", "LOCALHOST:80", "[::1]:8765", "192.168.0.7:1", "train.EXAMPLE:8765"]
)
def test_a_service_answers_to_its_names_and_to_addresses(host):
    assert status_of(host=host) == 200
    assert status_of(host=host, origin=f"http://{host}") == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "", "[::1", "localhost.evil"]
)
def test_another_name_that_leads_here_is_refused(host):
    assert status_of(host=host) == 403
    assert status_of(host=host, origin=f"http://{host}") == 403


def test_a_request_without_host_is_refused():
    assert status_of() == 403


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:3000", "http://127.0.0.1", "http://localhost:8765", ""]
)
def test_a_page_from_elsewhere_is_refused(origin):
    assert status_of(host="127.0.0.1:8765", origin=origin) == 403
