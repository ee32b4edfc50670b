"""Records of workers on disk: which runs where, and how each is made."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlframe.coordinator.messages import Role, WorkerInfo
from rlframe.errors import UsageError
from rlframe.interprocess.files import write_atomically
from rlframe.interprocess.processes import ProcessId

MakeWorker = Callable[[str, int, int], Any]  # (worker_id, index, incarnation) -> an object with the worker's calls


_KEPT = ("role", "index", "incarnation", "pid", "started", "host", "address")


def record_of(role: Role, index: int, incarnation: int, process: ProcessId) -> WorkerInfo:
    """The record of a worker whose process, on this machine, has yet to serve."""
    return WorkerInfo(role, index, incarnation, host=this_host(), pid=process.pid, started=process.started)


class Records:
    """The records of `state_dir/workers`: of each worker, the newest incarnation's process and address."""

    def __init__(self, state_dir: str | os.PathLike[str]) -> None:
        self._dir = pathlib.Path(state_dir) / "workers"
        self._dir.mkdir(parents=True, exist_ok=True)

    def all(self) -> list[WorkerInfo]:
        """The records that there are."""
        records = (self._read(path) for path in sorted(self._dir.glob("*.json")))
        return [record for record in records if record is not None]

    def write(self, record: WorkerInfo) -> bool:
        """Puts the record in the place of an older one; False where there is a newer one, which stays.

        One of the same incarnation stays too, where it has an address and this one has none yet.
        """
        path = self._path(record)
        with self._locked():
            before = self._read(path)
            if before is not None and before.incarnation > record.incarnation:
                return False
            if before is None or before.incarnation < record.incarnation or record.address or not before.address:
                write_atomically(path, json.dumps({name: getattr(record, name) for name in _KEPT}))
        return True

    def remove(self, record: WorkerInfo) -> None:
        """Removes the record of this process; that of another stays."""
        with self._locked():
            before = self._read(self._path(record))
            if before is not None and (before.process, before.host) == (record.process, record.host):
                self._path(record).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock that the workers of this directory share; the kernel lets go of it for who dies."""
        descriptor = os.open(self._dir, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _path(self, record: WorkerInfo) -> pathlib.Path:
        return self._dir / f"{record.role}-{record.index}.json"

    @staticmethod
    def _read(path: pathlib.Path) -> WorkerInfo | None:
        try:
            return WorkerInfo(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None


def this_host() -> str:
    """The name of this machine, or of the container."""
    return socket.gethostname()


def save_workers(state_dir: str | os.PathLike[str], workers: Mapping[str, MakeWorker]) -> None:
    """Writes what makes the workers of each role, for their processes to read: `state_dir/workers.pkl`.

    Raises:
        UsageError: one of them cannot be pickled.
    """
    import cloudpickle

    directory = pathlib.Path(state_dir)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        pickled = cloudpickle.dumps(dict(workers))
    except Exception as error:
        raise UsageError(
            f"The workers {', '.join(workers)} cannot be sent to their processes: {type(error).__name__}: {error}. "
            "What makes them, and what that holds, must be picklable."
        ) from error
    write_atomically(directory / "workers.pkl", pickled)


def load_maker(state_dir: str | os.PathLike[str], role: str) -> MakeWorker:
    """Load the function that makes the workers of this role.

    Raises:
        UsageError: nobody wrote it.
    """
    import cloudpickle

    path = pathlib.Path(state_dir) / "workers.pkl"
    try:
        workers = cloudpickle.loads(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{path} is not there: whoever makes the operator writes it, by save_workers().") from None
    if role not in workers:
        raise UsageError(f"{path} makes no workers of the role {role!r}, only {', '.join(workers)}.")
    return workers[role]
