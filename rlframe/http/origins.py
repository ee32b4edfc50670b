"""Which pages may call a service: those that it served itself, under a name that is its own.

A service on loopback is reached by every page that a browser on this machine has open. A page from elsewhere may send
it a POST whose answer it never sees (CSRF), or have its own name lead here, and so pass for the service's page (DNS
rebinding). The header Origin tells the first, Host the second; programs that are no browsers send the one as they
should and the other not at all.
"""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rlframe.http.middleware import Refusal, detail


class SameOrigin:
    """ASGI: 403 unless Host is this service's, and Origin, where there is one, is the same.

    Args:
        hosts: names that are the service's, beside `localhost` and any IP address: those lead nowhere else.
        refusal: what refusals look like.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str] = (), refusal: Refusal = detail) -> None:
        self._app = app
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (problem := self._problem(Headers(scope=scope))):
            await self._refusal(problem, 403, None)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _problem(self, headers: Headers) -> str:
        host = headers.get("host", "").lower()
        name = _name(host)
        if name not in self._hosts and not _is_address(name):
            return (
                f"The header Host names {name[:100]!r}, which is not known to be this service's name. Ask for it by "
                "its IP address or localhost, or have it started with that name as an allowed host."
            )
        origin = headers.get("origin")
        if origin is not None and origin.lower().rpartition("://")[2] != host:
            return f"Pages of {origin[:100]!r} may not call this service: only its own may."
        return ""


def _name(host: str) -> str:
    """Without the port, and the brackets of an IPv6 address; empty where it cannot be a host."""
    try:
        return urllib.parse.urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
