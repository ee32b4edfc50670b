"""Access control of services.

A service with a token answers clients that send the token. A service without a token answers local programs and its
own pages.

Any page that is open in a browser on this machine can reach a service on loopback. A page of another site has two ways
to attack:

- CSRF: the page sends a request and does not need the response, for example with a form, or with an image whose address
  is `/reset_data`. The headers Origin and Sec-Fetch-Site (https://www.w3.org/TR/fetch-metadata/) reveal this attack.
  Only browsers send these headers.
- DNS rebinding: the host name of the other site resolves to this machine, so the browser treats the page as a page of
  the service. The header Host reveals this attack. A service with a token does not check Host, because pages of other
  sites cannot have the token.
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

_PAGES = ("/", "/docs")  # links on other sites may open these pages, because the pages contain no data


class RequireToken:
    """ASGI middleware that answers 401 to requests without the bearer token. Paths in `without` need no token."""

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
    """ASGI middleware that answers 403 to pages of other sites and, if the service has no token, to other machines.

    Args:
        token: Whether requests need a token.
        no_token: Whether other machines may call a service that has no token. If True, host names without a dot are
            also accepted, because no public web site has such a name. If False, the service answers only loopback
            connections, even if it listens on other addresses.
        hosts: Accepted host names if the service has no token. `localhost` and IP addresses are always accepted,
            because DNS rebinding cannot use them.
        origins: Origins of other pages that may call the service, or *.
        changing: Path suffixes. A GET request to such a path changes the state of the service.
        refusal: Creates the response to a refused request.
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
                "This service requires no token, so it answers only its own machine, at 127.0.0.1. To answer other "
                "machines, start it with a token (--token-file FILE) or, if every client that reaches it may call it, "
                "with --no-token. Under uvicorn, set its environment variable ..._TOKEN_FILE or ..._NO_TOKEN=true."
            )
        if name in self._hosts or _is_address(name) or (self._no_token and name and "." not in name):
            return ""
        return (
            f"The header Host is {name[:100]!r}, which is not a name of this service. Use the service's IP address or "
            "localhost, or start the service with this name: --allowed-host NAME."
        )

    def _origin_problem(self, scope: Scope, headers: Headers, host: str) -> str:
        """Return an error message if the browser's headers show that the page is from another site, else ""."""
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site == "same-origin":  # do not compare with Host, which a proxy can change
            return ""
        if origin is not None:
            own = origin.lower().rpartition("://")[2] == host and site in (None, "none")
            if own or "*" in self._origins or origin.lower() in self._origins:
                return ""
            return f"Pages of {origin[:100]!r} may not call this service. Only its own pages may."
        path = scope["path"]
        if site is None:
            # Browsers omit Sec-Fetch-Site and Origin if they load an image from an http address other than loopback.
            if path.endswith(self._changing) and headers.get("user-agent", "").startswith("Mozilla/"):
                return f"A browser may not request {path[:100]}, because the requesting page is unknown. Use a program."
            return ""
        navigation = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
        if site == "none" or (navigation and scope["method"] in ("GET", "HEAD") and path in _PAGES):
            return ""
        return "Pages of other sites may not call this service. Only its own pages may."


def _is_local(server: tuple[str, int | None] | None) -> bool:
    """Return True if only this machine can reach the server's address. None is the address of a Unix socket."""
    return server is None or server[1] is None or is_loopback(server[0])


@functools.lru_cache(maxsize=64)  # a small cache, because clients use few host names
def _name(host: str) -> str:
    """Return the host name without the port and without the brackets of an IPv6 address. Return "" if it is invalid."""
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
