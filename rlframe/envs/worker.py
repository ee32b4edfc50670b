"""The process at the other end of a process pool: steps its share of the environments when it is woken."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from rlframe.envs import shared
from rlframe.envs.group import EnvGroup, build_group
from rlframe.errors import EnvError, RlframeError, UsageError
from rlframe.interprocess.processes import die_soon_after_parent

ORPHAN_GRACE = 2.0  # seconds that a worker whose parent is gone has to close its environments
_IDLE_WAIT = 3600.0  # seconds; a worker waits for its parent, whose end wakes it too


class Job(NamedTuple):
    """What a worker is told at its start."""

    builder: bytes  # pickled: index -> SingleEnv
    start: int
    stop: int
    worker: int
    num_workers: int
    num_envs: int
    is_sync: bool


class Descriptors(NamedTuple):
    """What a worker inherits."""

    connection: int
    memory: int


def main(descriptors: Descriptors) -> None:
    """Runs until told to close or until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it closes its workers
    die_soon_after_parent()
    connection = Connection(descriptors.connection)
    watch = ParentWatch(connection)
    threading.Thread(target=watch.run, daemon=True).start()
    try:
        job: Job = pickle.loads(connection.recv_bytes())
        _set_title(f"rlframe: env worker {job.worker}")
        group = _build(job, connection)
        if group is None:
            return
        connection.recv_bytes()  # the pool has laid out the memory
    except (EOFError, OSError):
        return
    gc.collect()
    gc.freeze()  # what was imported so far will not become garbage: spare the collector from looking
    Worker(job, group, connection, descriptors.memory, watch).serve()


class ParentWatch:
    """Ends this process soon after its parent, even in the middle of a step that never returns.

    Unless that step keeps Python's lock: then `die_soon_after_parent` does.
    """

    def __init__(self, connection: Connection):
        self.parent_is_gone = False
        self.wake: Callable[[], None] | None = None  # the worker, once it sleeps
        self._parent = os.getppid()
        self._poll = select.poll()
        self._poll.register(connection.fileno(), 0)  # of the connection, only its end is of interest

    def run(self) -> None:
        """Runs in a thread of its own; asleep until the parent's end of the connection closes."""
        while not self._poll.poll(1000.0) and os.getppid() == self._parent:
            pass
        self.parent_is_gone = True
        if self.wake is not None:
            self.wake()
        time.sleep(ORPHAN_GRACE)
        os._exit(1)


class Worker:
    """Serves the commands of one pool."""

    def __init__(self, job: Job, group: EnvGroup, connection: Connection, memory: int, watch: ParentWatch):
        self._job, self._group, self._connection, self._watch = job, group, connection, watch
        block = shared.Block(memory, job.num_workers, job.num_envs, group.layout, group.action_spec)
        self._go, self._done = block.go[job.worker], block.done
        watch.wake = self._go.wake
        self._headers = block.headers
        self._header = block.headers[job.worker]
        self._requests, self._results = block.requests[job.worker], block.results[job.worker]
        self._actions = block.actions
        group.log_to(block.logs[job.worker])
        group.at = self._header[shared.AT : shared.AT + 1]
        self._rows = [frame.rows(job.start, job.stop) for frame in block.frames]

    def serve(self) -> None:
        """Answers commands until CLOSE, then closes the environments."""
        work = self._serve_sync if self._job.is_sync else self._serve_async
        try:
            work()
        except Exception as error:
            send_error(self._connection, error)
            self._header[shared.FAILED] = 1
            self._done.wake()
        finally:
            # An environment that cannot close must not keep the others, or the process, from ending.
            with contextlib.suppress(Exception):
                self._group.close()

    def _next_command(self, served: int) -> int:
        while not self._watch.parent_is_gone:
            value = self._go.value
            if self._header[shared.GO] != served:
                return self._header[shared.COMMAND]
            self._go.wait(value, _IDLE_WAIT)
        return shared.CLOSE

    def _serve_sync(self) -> None:
        header, group, rows = self._header, self._group, self._rows
        actions = self._actions[self._job.start : self._job.stop]
        served = 0
        while (command := self._next_command(served)) != shared.CLOSE:
            served += 1
            if command == shared.STEP:
                group.step(actions, rows[header[shared.FRAME]])
            elif command == shared.RESET:
                group.reset(rows[header[shared.FRAME]])
            else:
                method, arguments = self._connection.recv()
                self._connection.send(("ok", getattr(group, method)(*arguments)))
            header[shared.DONE] = served
            self._done.wake()

    def _serve_async(self) -> None:
        header, first, capacity = self._header, self._job.start, self._job.num_envs
        all_headers, wanted = self._headers, self._headers[0]
        rows = self._rows[0]
        served = 0
        while True:
            value = self._go.value
            if self._watch.parent_is_gone or header[shared.COMMAND] == shared.CLOSE:
                return
            if header[shared.REQUESTED] == served:
                self._go.wait(value, _IDLE_WAIT)
                continue
            env_id = int(self._requests[served % capacity])
            self._group.step_one(env_id - first, self._actions[env_id], rows, env_id - first)
            self._results[served % capacity] = env_id
            served += 1
            header[shared.DONE] = served
            # Waking the pool for each of many light environments would cost more than stepping them.
            if sum([one[shared.DONE] for one in all_headers]) >= wanted[shared.WANTED]:
                self._done.wake()


def send_error(connection: Connection, error: Exception) -> None:
    """Sends an exception as text: its own class might not be importable, or not survive a pickle."""
    text = getattr(error, "traceback_text", None) or "".join(traceback.format_exception(error))  # type: ignore[call-overload]
    kind = "usage" if isinstance(error, UsageError) else "env"
    sentence = str(error) if isinstance(error, RlframeError) else f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        connection.send((kind, sentence, text))


def _build(job: Job, connection: Connection) -> EnvGroup | None:
    """Builds the environments and tells the pool their specs, or why that failed."""
    try:
        builder: Any = pickle.loads(job.builder)
        group = build_group(builder, builder.seed_of, job.start, job.stop)
    except Exception as error:
        if not isinstance(error, RlframeError):
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            sentence = f"A worker could not load the builder of the environments: {type(error).__name__}: {error}"
            error = EnvError(sentence)
            error.traceback_text = text  # type: ignore[attr-defined]
        send_error(connection, error)
        return None
    connection.send(("ok", (group.observation_spec, group.action_spec)))
    return group


def _set_title(title: str) -> None:
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(title)
