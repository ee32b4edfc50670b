"""Post one body repeatedly on several connections: `python -m benchmarks.ours.posts URL BODY_FILE ...`.

The client does as little work as possible, so that the server is measured. It prints `ready`, starts when its stdin is
closed or receives a line, and prints {"per_second", "posts"} at the end. `per_second` excludes the warm-up.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
import time
import urllib.parse


class PostConnection:
    """One connection that is kept open."""

    def __init__(self, url: str, body: bytes, content_type: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port), timeout=120.0)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: {content_type}\r\n"
        self._request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def post(self) -> bool:
        """Post the body. Return True if the status is 200."""
        self._socket.sendall(self._request)
        response = b""
        while b"\r\n\r\n" not in response:
            response += self._more()
        head, _, body = response.partition(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        while len(body) < length:
            body += self._more()
        return head.startswith(b"HTTP/1.1 200")

    def _more(self) -> bytes:
        received = self._socket.recv(65536)
        if not received:
            raise ConnectionError("the server closed the connection")
        return received


def main() -> None:
    """Connect, wait for a line on stdin, and post."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("body")
    parser.add_argument("--content-type", default="application/json")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--warm-up", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    with open(args.body, "rb") as file:
        body = file.read()
    connections = [PostConnection(args.url, body, args.content_type) for _ in range(args.connections)]
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter() + args.warm_up
    end = start + args.seconds
    posts, counted = [0] * len(connections), [0] * len(connections)

    def work(i: int) -> None:
        while (now := time.perf_counter()) < end:
            if not connections[i].post():
                raise RuntimeError("a post was refused")
            posts[i] += 1
            counted[i] += start <= now and time.perf_counter() < end

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(connections))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(args.warm_up + args.seconds + 120.0)
    print(json.dumps({"per_second": sum(counted) / args.seconds, "posts": sum(posts)}))


if __name__ == "__main__":
    main()
