"""The pages of a service: static files that load nothing from elsewhere. What they show, they ask the service for."""

from __future__ import annotations

import base64
import hashlib
import pathlib
import re

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

_DOCS = pathlib.Path(__file__).with_name("docs.html")  # asks for /openapi.json


class Page:
    """ASGI: the page at / for who asks for text/html; all others get what they always got.

    It holds no data, so it needs no token: it asks whoever looks at it for one.

    Args:
        file: the page, with one `<script>` and one `<style>`.
    """

    def __init__(self, app: ASGIApp, file: pathlib.Path) -> None:
        self._app = app
        self._response = _response(file)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope["type"] == "http" and scope["path"] == "/" and scope["method"] in ("GET", "HEAD")
        if asked and "text/html" in Headers(scope=scope).get("accept", ""):
            await self._response(scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def describe_endpoints() -> Response:
    """Show the endpoints, as /openapi.json has them."""
    return _response(_DOCS)


def _response(file: pathlib.Path) -> Response:
    html = file.read_text(encoding="utf-8")
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": _policy(html),
        "Referrer-Policy": "no-referrer",
        "Vary": "Accept",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(html, headers=headers, media_type="text/html")


def _policy(html: str) -> str:
    """Nothing but the page's own script and style, and requests to where it came from."""
    sources = {"default": "'none'", "connect": "'self'", "img": "data:"}
    for name in ("script", "style"):
        (content,) = re.findall(rf"<{name}>(.*?)</{name}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        sources[name] = f"'sha256-{digest}'"
    listed = "; ".join(f"{name}-src {source}" for name, source in sources.items())
    return f"{listed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
