"""The process of one worker: `python -m rlframe.coordinator.workers.process STATE_DIR ROLE INDEX INCARNATION`.

It serves the worker's calls until SIGTERM, until the process that owns the run is gone, or until nobody has called
for a while; never because the coordinator died, whose successor finds it by its record in STATE_DIR.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

from rlframe import streams
from rlframe.coordinator.messages import Role
from rlframe.coordinator.workers.records import Records, load_maker, record_of
from rlframe.engines import logs
from rlframe.engines.launching.node_main import begin_process, command_of, run_to_exit
from rlframe.errors import UsageError
from rlframe.interprocess.processes import ProcessId, this_process
from rlframe.transport import Transport
from rlframe.transport.sockets import SocketTransport

CALLS = ("ping", "resources", "start_task", "data_demand", "learn", "get_data", "close_task")  # what is served
CLOSING = 5.0  # seconds that a worker may take to close
SILENCE = 60.0  # seconds without a call after which a worker ends
_TOLD = "SIGTERM"  # why it ends, where the operator wants it to
_LOOKS = 0.5  # seconds between two looks at the owner and the clock


@dataclasses.dataclass(frozen=True)
class Life:
    """What ends a worker's process, beside SIGTERM."""

    owner: ProcessId | None = None  # it ends when this one has; None: it has no owner on this machine
    silence: float = SILENCE  # seconds without a call; counted from when it serves


class WorkerServer:
    """Serves a worker's calls.

    Args:
        worker: has those of `CALLS` that its role needs.
        transport: by which.

    Attributes:
        address: at which it is called.
    """

    def __init__(self, worker: Any, transport: Transport) -> None:
        self._last_call = time.monotonic()
        methods = {name: self._noticed(getattr(worker, name)) for name in CALLS if hasattr(worker, name)}
        self._server = transport.serve(methods)
        self.address = self._server.address

    def silent_for(self) -> float:
        """Seconds since somebody called, or could: no call takes longer than the answers to it are waited for."""
        return time.monotonic() - self._last_call

    def stop(self) -> None:
        """Serves no more."""
        self._server.stop()

    def _noticed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._last_call = time.monotonic()
            return call(*args, **kwargs)

        return wrapped


class WorkerEnd:
    """When a worker is to end, and why: `why` is set by a signal, or by the thread that watches `life`.

    That thread also sees to it that the end comes: a process that has not closed in time is ended as it is.
    """

    def __init__(self, life: Life) -> None:
        self.server: WorkerServer | None = None
        self.why = ""
        self._life = life
        self._came = threading.Event()
        threading.Thread(target=self._watch, name="rlframe worker's end", daemon=True).start()

    def come(self, why: str) -> None:
        """The worker is to end."""
        self.why = self.why or why
        self._came.set()

    def has_come(self, wait: float | None = 0.0) -> bool:
        """Whether the worker is to end."""
        return self._came.wait(wait)

    def on_sigterm(self) -> None:
        """Has SIGTERM end this process in this way."""

        def handle(number: int, frame: FrameType | None) -> None:
            del number, frame
            # Not from here: the thread that the handler interrupts may hold the event's lock.
            threading.Thread(target=self.come, args=(_TOLD,), daemon=True).start()

        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is the launcher's

    def _watch(self) -> None:
        while not self._came.wait(_LOOKS):
            owner, server = self._life.owner, self.server
            if owner is not None and not owner.is_alive:
                self.come(f"its owner, process {owner.pid}, is gone")
            elif server is not None and server.silent_for() > self._life.silence:
                self.come(f"nobody called for {self._life.silence:g} s")
        threading.Event().wait(CLOSING + 1.0)
        _say(f"did not close within {CLOSING:g} s: ended as it is")
        os._exit(1)


def run(state_dir: str, role: Role, index: int, incarnation: int, life: Life) -> None:
    """Makes the worker, serves it, and returns when it has ended well.

    Args:
        state_dir: holds `workers.pkl`, and the workers' records.
        role, index, incarnation: which worker.
        life: what ends it.
    """
    end = WorkerEnd(life)
    end.on_sigterm()
    records = Records(state_dir)
    record = record_of(role, index, incarnation, this_process())
    if not records.write(record):
        raise UsageError(f"{record.worker_id} has a newer incarnation than {incarnation}: this one is not wanted.")
    try:
        worker = load_maker(state_dir, role)(record.worker_id, index, incarnation)
        try:
            if not end.has_come():
                end.server = server = WorkerServer(worker, SocketTransport())
                if records.write(dataclasses.replace(record, address=server.address)):
                    end.has_come(None)
                else:
                    end.come("a newer incarnation has taken its place")
                server.stop()
            if end.why != _TOLD:  # by whom this is said, if it is worth it
                _say(f"ends: {end.why}")
        finally:
            end.come("it failed")  # from here on the time is limited, however it came to an end
            if hasattr(worker, "close"):
                worker.close()
    finally:
        records.remove(record)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one worker; the process's exit code says how it ended."""
    streams.prepare()
    options = _parse(arguments)
    begin_process(f"{options.role}/{options.index}")
    logs.set_up(f"{options.role}-{options.index}")
    owner = None
    if options.owner:
        pid, _, started = options.owner.partition(":")
        owner = ProcessId(int(pid), int(started))
    life = Life(owner, options.silence)
    run_to_exit(functools.partial(run, options.state_dir, options.role, options.index, options.incarnation, life))


def command(state_dir: str | os.PathLike[str], role: str, index: int, incarnation: int, life: Life) -> list[str]:
    """The command line of a worker's process on this machine, which imports from where this one does."""
    options = ["--silence", f"{life.silence:g}"]
    if life.owner is not None:
        options += ["--owner", f"{life.owner.pid}:{life.owner.started}"]
    numbers = [str(index), str(incarnation)]
    return command_of("rlframe.coordinator.workers.process", os.fspath(state_dir), role, *numbers, *options)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rlframe.coordinator.workers.process", description=__doc__)
    parser.add_argument("state_dir", help="the run's coordinator directory, with workers.pkl")
    parser.add_argument("role")
    parser.add_argument("index", type=int)
    parser.add_argument("incarnation", type=int)
    parser.add_argument("--owner", default="", help="PID:STARTED of the process without which the worker ends")
    parser.add_argument("--silence", type=float, default=SILENCE, help="seconds without a call after which it ends")
    return parser.parse_args(arguments)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
