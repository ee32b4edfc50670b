"""A queue of jobs with the control API in front of it, as a process."""

from __future__ import annotations

import os
import sys

from rlframe.coordinator.control.address import make_queue_token, remove_queue, write_queue
from rlframe.coordinator.control.app import make_app
from rlframe.coordinator.control.job_target import JobTarget
from rlframe.coordinator.control.jobs import Command, JobQueue, train_command
from rlframe.coordinator.control.jobs_endpoints import jobs_router
from rlframe.coordinator.control.serving import CAN, HOST, MAX_CONNECTIONS, PORT
from rlframe.http.serving import Server, address_of, listen
from rlframe.http.token_file import check_guarded, read_token


def serve_jobs(
    runs: str | os.PathLike,
    host: str = HOST,
    port: int = PORT,
    token_file: str | None = None,
    *,
    max_connections: int = MAX_CONNECTIONS,
    command: Command = train_command,
) -> None:
    """Serves until SIGTERM or Ctrl-C. The job that runs goes on; the next service on the same folder adopts it.

    Args:
        runs: directory of the queue and its runs.
        host, port: as `serve_control`.
        token_file: with the token that requests have to carry; None: one that is made in `runs`, and only loopback may
            be listened at. Who reaches the service runs
            programs as its owner, so there always is one.
        max_connections: at the same time; more are refused.
        command: that runs a job.

    Raises:
        UsageError: it cannot listen there, needs a token, or another service has the folder.
    """
    check_guarded(host, token_file, CAN)
    token = read_token(token_file)  # before anything is made
    listener = listen(host, port)
    try:
        queue = JobQueue(runs, command)
        try:
            token_file = token_file or make_queue_token(runs)  # of whoever has the queue
            token = read_token(token_file)
        except BaseException:
            queue.close()
            raise
    except BaseException:
        listener.close()
        raise
    url = f"http://{address_of(listener)}"
    app = make_app(JobTarget(queue), token, routers=[jobs_router(queue)])

    def greeting() -> None:
        write_queue(runs, url, token_file)
        # What is not a terminal may be a log that others read.
        link = f"{url}/#token={token}" if sys.stdout.isatty() else url
        print(f"Coordinator at {link}  (endpoints: /docs, token: {token_file})", flush=True)

    try:
        queue.start()
        Server(app, max_connections, greeting, let_go=app.state.let_go).run(sockets=[listener])
    finally:
        remove_queue(runs)
        queue.close()
        running = queue.running()
        if running is not None:
            print(
                f"{running.id} goes on (process {running.pid}): the next service with --runs {runs} adopts it.",
                flush=True,
            )
