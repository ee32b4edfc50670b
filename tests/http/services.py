"""Start the three HTTP services for tests. Each has requests that only read, and requests that change its state."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from rlframe.control.app import serve_control
from rlframe.trajectories.config import Settings
from rlframe.trajectories.service.app import TrajectoryServer
from tests.control.scripted_coordinator import ScriptedCoordinator
from tests.language.server.serving import serving_policy
from tests.trajectories.api import Api, group

COMPLETION = {"model": "policy", "prompt": "a", "max_tokens": 1}


@dataclasses.dataclass
class Target:
    """A running service.

    Attributes:
        url: URL without a trailing slash.
        reads: List of (method, path, body) for requests that only read.
        changes: List of (method, path, body) for requests that change the state.
        state: Function that returns the part of the state that the requests in `changes` modify.
    """

    url: str
    reads: list[tuple[str, str, Any]]
    changes: list[tuple[str, str, Any]]
    state: Callable[[], Any]

    @property
    def port(self) -> int:
        return int(self.url.split(":")[2].split("/")[0])


@contextlib.contextmanager
def trajectories(host: str = "127.0.0.1", **settings: Any) -> Iterator[Target]:
    """Start a trajectory service with a complete batch in its queue. The URL always has the loopback address."""
    server = TrajectoryServer(Settings(host, port=0, store="memory", **settings))
    url = f"http://127.0.0.1:{server.url.rpartition(':')[2]}"
    try:
        with httpx.Client(base_url=url, timeout=60.0) as client:
            api = Api(client).started(batch_size=4)
            api.send(1, 2)

            def state() -> Any:
                status = api.get("/status").json()
                return status["current_step"], status["queue_size"], status["paused"]

            yield Target(
                url,
                [("GET", "/status", None), ("GET", "/report", None), ("GET", "/", None)],
                [
                    ("GET", "/batch", None),
                    ("GET", "/runs/default/batch", None),
                    ("GET", "/reset_data", None),
                    ("POST", "/reset_data", {}),
                    ("POST", "/pause", {}),
                    ("POST", "/scored_data", group(mark=3)),
                ],
                state,
            )
    finally:
        server.close()


@contextlib.contextmanager
def policy(**options: Any) -> Iterator[Target]:
    """Start a policy server with a tiny model."""
    with serving_policy(**options) as server:
        yield Target(
            f"http://127.0.0.1:{server.url().rpartition(':')[2].removesuffix('/v1')}",
            [("GET", "/v1/models", None), ("GET", "/health", None), ("GET", "/v1/policy", None)],
            [("POST", "/v1/completions", COMPLETION)],
            lambda: server.stats()["requests"],
        )


@contextlib.contextmanager
def control(**options: Any) -> Iterator[Target]:
    """Start the control service of a run with a scripted coordinator."""
    coordinator = ScriptedCoordinator()
    with serve_control(coordinator, port=0, **options) as server:
        yield Target(
            server.url,
            [("GET", "/status", None), ("GET", "/events", None), ("GET", "/", None)],
            [("POST", "/pause", None), ("POST", "/stop", {}), ("POST", "/scale", {"role": "collector", "n": 3})],
            lambda: list(coordinator.calls),
        )
