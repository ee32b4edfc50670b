"""`SameOrigin` lets programs and the service's own pages call a service, and refuses pages of other sites."""

from __future__ import annotations

import asyncio

import pytest

from rlframe.http.access import SameOrigin

OWN = "127.0.0.1:8765"
LOOPBACK, LAN = ("127.0.0.1", 8765), ("192.168.0.7", 8765)
NAVIGATION = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
IMAGE = {"sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
FRAME = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}
CHROMIUM = {"user-agent": "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36"}


def is_answered(method="GET", path="/batch", headers=None, *, server=LOOPBACK, token=False, **options) -> bool:
    """Return True if `SameOrigin` accepts a request to a service with the host names `OWN` and train.example."""
    sent = []

    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    named = [(name.encode(), value.encode()) for name, value in {"host": OWN, **(headers or {})}.items() if value]
    scope = {"type": "http", "method": method, "path": path, "headers": named, "server": server}
    options = {"hosts": ["Train.example"], "changing": ("/batch", "/reset_data"), **options}
    asyncio.run(SameOrigin(application, token=token, **options)(scope, None, send))
    return {200: True, 403: False}[sent[0]["status"]]


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize(
    "method, path, headers, expected",
    [
        # Requests from programs, which do not send Origin or Sec-Fetch-Site.
        ("GET", "/batch", {}, True),
        ("POST", "/reset_data", {"user-agent": "python-requests/2.32"}, True),
        # Requests from the service's own pages, and requests to an address that a person typed into the browser.
        ("GET", "/report", {"sec-fetch-site": "same-origin"}, True),
        ("POST", "/pause", {"sec-fetch-site": "same-origin", "origin": f"http://{OWN}"}, True),
        ("POST", "/pause", {"origin": f"http://{OWN}", **CHROMIUM}, True),
        ("POST", "/pause", {"sec-fetch-site": "same-origin", "origin": "https://proxy.example"}, True),
        ("GET", "/reset_data", {"sec-fetch-site": "none", **NAVIGATION}, True),
        ("GET", "/report", CHROMIUM, True),
        # Requests from pages of other sites. The header Sec-Fetch-Site reveals them.
        ("GET", "/batch", {"sec-fetch-site": "cross-site", **IMAGE}, False),
        ("GET", "/reset_data", {"sec-fetch-site": "same-site", **IMAGE}, False),
        ("GET", "/report", {"sec-fetch-site": "cross-site"}, False),
        ("GET", "/report", {"sec-fetch-site": "something new"}, False),
        # Requests from pages of other sites. The header Origin reveals them.
        ("POST", "/pause", {"origin": "http://evil.example"}, False),
        ("POST", "/pause", {"origin": "null"}, False),
        ("POST", "/pause", {"origin": "http://127.0.0.1"}, False),
        ("POST", "/pause", {"origin": "http://localhost:3000"}, False),
        ("POST", "/pause", {"origin": "http://localhost:8765"}, False),
        ("GET", "/batch", {"origin": "http://evil.example", "sec-fetch-site": "none"}, False),
        ("POST", "/pause", {"origin": f"http://{OWN}", "sec-fetch-site": "cross-site"}, False),
        ("OPTIONS", "/pause", {"origin": "http://evil.example", "access-control-request-method": "POST"}, False),
        # Requests from pages of other sites to http addresses other than loopback. Browsers send no Sec-Fetch-Site and
        # no Origin to these addresses, but the header User-Agent reveals the browser.
        ("GET", "/batch", CHROMIUM, False),
        ("GET", "/runs/mine/batch", CHROMIUM, False),
        ("GET", "/reset_data", CHROMIUM, False),
        # Links on pages of other sites. They may open the service's pages, but no other address of the service.
        ("GET", "/", {"sec-fetch-site": "cross-site", **NAVIGATION}, True),
        ("GET", "/docs", {"sec-fetch-site": "same-site", **NAVIGATION}, True),
        ("GET", "/", {"sec-fetch-site": "cross-site", **FRAME}, False),
        ("GET", "/", {"sec-fetch-site": "cross-site", **IMAGE}, False),
        ("POST", "/", {"sec-fetch-site": "cross-site", **NAVIGATION}, False),
        ("GET", "/reset_data", {"sec-fetch-site": "cross-site", **NAVIGATION}, False),
        ("GET", "/batch", {"sec-fetch-site": "cross-site", **NAVIGATION}, False),
        ("GET", "/status", {"sec-fetch-site": "cross-site", **NAVIGATION}, False),
    ],
)
def test_programs_and_the_service_pages_may_call_a_service_but_pages_of_other_sites_may_not(
    method, path, headers, expected, token
):
    assert is_answered(method, path, headers, token=token) is expected


@pytest.mark.parametrize(
    "host", [OWN, "localhost", "LOCALHOST:80", "[::1]:8765", "192.168.0.7:1", "train.EXAMPLE:8765"]
)
def test_requests_to_the_names_of_the_service_and_to_ip_addresses_are_answered(host):
    assert is_answered(headers={"host": host})
    assert is_answered("POST", "/pause", {"host": host, "origin": f"http://{host}"})


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "", "[::1", "localhost.evil", "trainer"]
)
def test_service_without_a_token_refuses_unknown_host_names(host):
    assert not is_answered(headers={"host": host})
    assert not is_answered(headers={"host": host, "sec-fetch-site": "same-origin"})
    assert is_answered(headers={"host": host}, token=True)


@pytest.mark.parametrize("server", [("0.0.0.0", 8765), LAN, ("::ffff:192.168.0.7", 8765), ("2001:db8::7", 8765)])
def test_other_machines_need_a_token_or_the_no_token_option(server):
    assert not is_answered(server=server)
    assert is_answered(server=server, no_token=True)
    assert is_answered(server=server, token=True)


@pytest.mark.parametrize(
    "server", [LOOPBACK, ("127.0.0.2", 1), ("::1", 1), ("::ffff:127.0.0.1", 1), ("/a/socket", None)]
)
def test_local_requests_need_no_token(server):
    assert is_answered(server=server)


def test_service_with_the_no_token_option_accepts_host_names_without_a_dot():
    """Names without a dot are safe: containers and machines of a cluster have such names, but web sites do not."""
    for host, expected in (
        ("rollout_server:8000", True),
        ("vm-7", True),
        ("evil.example", False),
        ("a.svc.local", False),
    ):
        assert is_answered(server=LAN, headers={"host": host}, no_token=True) is expected
    assert is_answered(server=LAN, headers={"host": "a.svc.local:8000"}, no_token=True, hosts=["a.svc.local"])


def test_pages_of_an_allowed_origin_may_call_a_service():
    page = {"origin": "http://pages.example", "sec-fetch-site": "cross-site"}
    assert is_answered("POST", "/pause", page, origins=["http://pages.example"])
    assert is_answered("POST", "/pause", page, origins=["*"])
    assert not is_answered("POST", "/pause", page, origins=["http://other.example"])
    assert not is_answered("GET", "/batch", {"sec-fetch-site": "cross-site", **IMAGE}, origins=["http://pages.example"])
