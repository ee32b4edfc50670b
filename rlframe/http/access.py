"""Who may call a service: whoever has its token. Without one, programs of this machine and the service's own pages.

Every page that is open in a browser of this machine can reach a service on loopback. A page of another site may send
a request without seeing the answer (CSRF: a form, or an image whose address is `/reset_data`), or let its own name
resolve to this machine and so pass for the service's page (DNS rebinding). The headers Origin and Sec-Fetch-Site
(https://www.w3.org/TR/fetch-metadata/) reveal the first, Host the second; programs other than browsers send neither of
the first two. Pages of other sites cannot have a token, so Host matters only for a service without one.
"""

from __future__ import annotations

import functools
import hmac
import ipaddress
import urllib.parse
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rlframe.http.bodies import Refusal, detail
from rlframe.http.config import is_loopback

_PAGES = ("/", "/docs")  # without data: links of other sites may open them


class RequireToken:
    """ASGI: answers 401 unless the request has the bearer token, or is for a path in `without`."""

    def __init__(self, app: ASGIApp, token: str, refusal: Refusal = detail, without: tuple[str, ...] = ()) -> None:
        self._app = app
        self._refusal = refusal
        self._expected = token.encode()
        self._without = without

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._without:
            scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self._expected):
                error = "This service needs the header Authorization: Bearer TOKEN, with the token of its --token-file."
                refused = self._refusal(error, 401, {"WWW-Authenticate": "Bearer"})
                await refused(scope, receive, send)
                return
        await self._app(scope, receive, send)


class SameOrigin:
    """ASGI: answers 403 to pages of other sites, and to requests that a service without a token must not answer.

    Args:
        token: whether requests need one.
        no_token: without one, whether other machines may call the service all the same, by names without a dot too,
            which no page on the web can have; else it answers at loopback only, however it listens.
        hosts: without a token, names that are the service's, beside `localhost` and any IP address: those lead nowhere
            else.
        origins: whose pages may call it beside its own, or *.
        changing: ends of paths whose GET changes something.
        refusal: what refusals look like.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: bool,
        no_token: bool = False,
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
        changing: tuple[str, ...] = (),
        refusal: Refusal = detail,
    ) -> None:
        self._app = app
        self._token, self._no_token = token, no_token
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        self._origins = {origin.lower() for origin in origins}
        self._changing = changing
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (problem := self._problem(scope)):
            await self._refusal(problem, 403, None)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> str:
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        problem = "" if self._token else self._host_problem(scope, _name(host))
        return problem or self._origin_problem(scope, headers, host)

    def _host_problem(self, scope: Scope, name: str) -> str:
        if not self._no_token and not _is_local(scope.get("server")):
            return (
                "This service asks for no token, so it answers its own machine only, at 127.0.0.1. For other machines "
                "start it with a token (--token-file FILE) or, where whoever reaches it may call it, with --no-token; "
                "under uvicorn by its environment variables ..._TOKEN_FILE and ..._NO_TOKEN=true."
            )
        if name in self._hosts or _is_address(name) or (self._no_token and name and "." not in name):
            return ""
        return (
            f"The header Host names {name[:100]!r}, which is not known to be this service's name. Ask for it by its IP "
            "address or localhost, or have it started with that name: --allowed-host NAME."
        )

    def _origin_problem(self, scope: Scope, headers: Headers, host: str) -> str:
        """Return the problem if a page of another site sent this, as the browser's headers show; else an empty text."""
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site == "same-origin":  # sent by the browser: a proxy may have changed Host
            return ""
        if origin is not None:
            own = origin.lower().rpartition("://")[2] == host and site in (None, "none")
            if own or "*" in self._origins or origin.lower() in self._origins:
                return ""
            return f"Pages of {origin[:100]!r} may not call this service: only its own may."
        path = scope["path"]
        if site is None:
            # Browsers send neither header with an image's GET to http addresses other than loopback.
            if path.endswith(self._changing) and headers.get("user-agent", "").startswith("Mozilla/"):
                return f"A browser does not say which page asks for {path[:100]}, so it may not: use a program."
            return ""
        navigation = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
        if site == "none" or (navigation and scope["method"] in ("GET", "HEAD") and path in _PAGES):
            return ""
        return "Pages from elsewhere may not call this service: only its own may."


def _is_local(server: tuple[str, int | None] | None) -> bool:
    """Return True if only this machine reaches the address of the connection; None means a Unix socket."""
    return server is None or server[1] is None or is_loopback(server[0])


@functools.lru_cache(maxsize=64)  # requests come by few names
def _name(host: str) -> str:
    """Remove the port, and the brackets of an IPv6 address; empty if it is no valid host."""
    try:
        return urllib.parse.urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


@functools.lru_cache(maxsize=64)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
