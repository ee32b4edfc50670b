"""The service as a process of its own."""

from __future__ import annotations

from rlframe.http.serving import Server, address_of, listen
from rlframe.trajectories.app import make_app, open_service
from rlframe.trajectories.settings import Settings


def serve(settings: Settings, host: str, port: int, max_connections: int) -> None:
    """Serves until SIGTERM or Ctrl-C, then answers what is under way and closes the store.

    Raises:
        UsageError: it cannot listen there; a setting cannot be.
        StoreError, PeerError: as `open_service`.
    """
    listener = listen(host, port)
    try:
        service = open_service(settings)
    except BaseException:
        listener.close()
        raise

    def greeting() -> None:
        address = address_of(listener)
        print(f"Trajectories at http://{address}  (endpoints: /docs)\n{service.store.durability}", flush=True)

    def give_up() -> None:  # the store failed: who watches over the process can start it again
        server.should_exit = True

    server = Server(make_app(settings, service), max_connections, greeting, service.stop_waiting)
    service.on_failure = give_up
    server.run(sockets=[listener])
    if service.failed is not None:
        raise service.failed
