"""The service as a process of its own, or as a node of a program."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

from rlframe import handles
from rlframe.http.serving import ServerThread
from rlframe.http.token_file import check_guarded, no_token_means
from rlframe.trajectories.service.app import make_app, open_service
from rlframe.trajectories.service.service import Service
from rlframe.trajectories.service.settings import CAN, Settings

MAX_CONNECTIONS = 1024
_END = 120.0  # seconds for requests under way, what is still to be written, and a snapshot


class TrajectoryServer:
    """The service: it answers from its construction until `stop()`.

    Args:
        settings: see `Settings`.
        host, port: where it listens.
        max_connections: at the same time; more are refused.

    Raises:
        UsageError: it cannot listen there, or needs a token to; a setting cannot be.
        StoreError, PeerError: as `open_service`.

    Attributes:
        url: of the service.
    """

    def __init__(self, settings: Settings, host: str, port: int, max_connections: int = MAX_CONNECTIONS) -> None:
        check_guarded(host, settings.token_file, CAN, settings.no_token)
        self._settings, self._stop = settings, threading.Event()
        self._service = open_service(settings)
        self._service.on_failure = self.stop  # the store failed: who watches over the process can start it again
        self._found = list(_found(self._service))
        try:
            app, let_go = make_app(settings, self._service), self._service.stop_waiting
            self._server = ServerThread(app, host, port, max_connections, let_go=let_go, ended=self.stop, end=_END)
        except BaseException:
            self._service.store.close()
            raise
        self.url = self._server.url

    def run(self) -> None:
        """Say where it listens; after `stop()` answer what is under way, and close the store.

        Raises:
            StoreError: the store failed: what was acknowledged is in it.
        """
        if self._settings.no_token:
            print(no_token_means(CAN), file=sys.stderr, flush=True)
        lines = [f"Trajectories at {self.url}  (endpoints: /docs)", self._service.store.durability, *self._found]
        print("\n".join(lines), flush=True)
        with handles.stopped_by_program(self.stop):
            self._stop.wait()
        self.close()
        if failure := self._service.failed or self._server.failure:
            raise failure

    def stop(self) -> None:
        """End `run()` once the requests under way are answered. Any thread may call it."""
        self._stop.set()

    def close(self) -> None:
        """End, and wait for it."""
        self.stop()
        self._server.close()


def _found(service: Service) -> Iterator[str]:
    """What a restored service found in its store, a line for each run."""
    for run in service.runs:
        epoch, status = service.queue(run).epoch, service.queue(run).status()
        groups = status.queue_size + status.buffered + status.leased
        if epoch.registration is not None or groups:
            found = f"run {run!r} at step {status.current_step}, with {groups} groups"
            yield f"Found in the store: {found}. --fresh begins anew."
