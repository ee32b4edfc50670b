"""A proxy in front of the real service that loses messages, as networks and load balancers do."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import threading
from collections import deque
from collections.abc import Iterator

TIMEOUT = 60.0  # maximum seconds until the service answers


class FlakyProxy:
    """A proxy that causes the faults that a test chose.

    Attributes:
        faults: Names of the faults for the next requests, one name for each request. Later requests have no fault.
            "refuse": the proxy closes the connection before the service gets the request. "drop": the service handles
            the request, but the answer is lost. "busy": the proxy answers with status 503 and a Retry-After header.
            "hang": the proxy does not answer. "other": the proxy answers with an HTML page, as another server would.
        requests: Method and path of each received request.
    """

    def __init__(self, service: str, retry_after: str) -> None:
        self.faults: deque[str] = deque()
        self.requests: list[str] = []
        self._service, self._retry_after = service.removeprefix("http://"), retry_after
        self._closed = threading.Event()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy._handle(self)

            do_GET = do_POST = handle_any

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(TIMEOUT)

    def _handle(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length", 0)))
        self.requests.append(f"{handler.command} {handler.path.partition('?')[0]}")
        fault = self.faults.popleft() if self.faults else "pass"
        if fault == "hang":
            self._closed.wait(TIMEOUT)
        if fault in ("refuse", "hang"):
            handler.close_connection = True
            return
        if fault in ("busy", "other"):
            page = b"<p>Hello</p>" if fault == "other" else b""
            handler.send_response(200 if page else 503)
            handler.send_header("Retry-After", self._retry_after)
            handler.send_header("Content-Length", str(len(page)))
            handler.end_headers()
            handler.wfile.write(page)
            return
        connection = http.client.HTTPConnection(self._service, timeout=TIMEOUT)
        with contextlib.closing(connection):
            connection.request(handler.command, handler.path, body, dict(handler.headers))
            answer = connection.getresponse()
            content = answer.read()
        if fault == "drop":
            handler.close_connection = True
            return
        handler.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("date", "transfer-encoding", "connection"):
                handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content)


@contextlib.contextmanager
def flaky_proxy(service: str, retry_after: str = "1") -> Iterator[FlakyProxy]:
    proxy = FlakyProxy(service, retry_after)
    try:
        yield proxy
    finally:
        proxy.close()
