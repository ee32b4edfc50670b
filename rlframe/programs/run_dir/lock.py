"""The lock of a run directory, so that only one process at a time writes to it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import pathlib
import secrets
import signal
import socket
import sys
import threading
import time
from types import TracebackType
from typing import Any

from rlframe import retry
from rlframe.errors import UsageError
from rlframe.interprocess.processes import ProcessId, this_process

NAME = "run.lock"

_HEARTBEAT = 5.0  # seconds between two heartbeats that the holder of a lock writes
_WATCH = 30.0  # a holder on another host counts as dead after this number of seconds without a heartbeat
_STALE = 120.0  # `holder_of` assumes that the holder is dead if the file has not changed for this number of seconds
_POLL = 0.05  # seconds between two attempts to get the lock
_SETTLE = 1.0  # seconds to wait for the record of a new holder, or for `holder_of` to release its shared lock
_KILL = 10.0  # seconds to wait after SIGKILL until the holder has ended

_log = logging.getLogger(__name__)

_open_descriptors: set[int] = set()


def _close_in_child() -> None:
    # A flock() lock exists until all copies of its descriptor are closed, so a forked child must close its copy.
    for descriptor in _open_descriptors:
        os.close(descriptor)
    _open_descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that holds a lock. It writes this record to the lock file."""

    pid: int
    started: int  # see `ProcessId`
    host: str
    boot: str  # boot id of the kernel; all containers on a machine share the kernel, its boot id and its locks
    since: str  # start time as text, for users
    ends_within: float  # maximum seconds that the process needs to end after SIGTERM

    @staticmethod
    def this(ends_within: float) -> Holder:
        """Return a record of this process."""
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return Holder(os.getpid(), this_process().started, socket.gethostname(), _boot_id(), since, ends_within)

    @property
    def is_of_this_kernel(self) -> bool:
        """Return True if the holder runs on the same kernel as this process, so on the same machine."""
        return self.boot == _boot_id()

    def terminate(self) -> None:
        """Send SIGTERM. Raise `UsageError` if this process cannot signal the holder."""
        if not self.is_of_this_kernel:
            raise UsageError(f"The run belongs to {self}. Stop it on that host.")
        if not ProcessId(self.pid, self.started).is_alive:
            raise UsageError(f"The run belongs to {self}, probably in another container. Stop it in that container.")
        self.send(signal.SIGTERM)

    def send(self, number: int) -> None:
        """Send a signal to the process. Raise `UsageError` if it belongs to another user."""
        try:
            os.kill(self.pid, number)
            os.kill(self.pid, signal.SIGCONT)  # a suspended process does not handle signals
        except PermissionError as error:
            raise UsageError(f"The run belongs to {self}, which another user started. You cannot stop it.") from error

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class RunLock:
    """A context in which this process is the only writer of a run directory.

    When a holder dies for any reason, the kernel releases its lock. File locks may not work across hosts, so a holder
    on another host counts as alive while the heartbeat in its record changes.

    Args:
        directory: directory of the run, which must exist.
        take_over: end the process that holds the lock: SIGTERM, so that it saves, then SIGKILL. If it cannot be
            signaled, replace the lock file. The holder then exits at its next heartbeat, without a save.
        ends_within: seconds that another process waits between SIGTERM and SIGKILL if it takes over from this one.

    Raises:
        UsageError: another process holds the lock.
    """

    def __init__(self, directory: pathlib.Path, take_over: bool = False, ends_within: float = 30.0) -> None:
        self._directory, self._path = directory, directory / NAME
        self._take_over = take_over
        self._descriptor = -1
        self._owner = os.getpid()
        self._holder = Holder.this(ends_within)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write_heartbeats, name="rlframe lock", daemon=True)

    def __enter__(self) -> RunLock:
        settled_by = time.monotonic() + _SETTLE
        while not self._try_lock(settled_by):
            time.sleep(_POLL)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if os.getpid() != self._owner:  # this is a forked child, which does not hold the lock
            return
        self._over.set()
        self._thread.join()
        if self._is_ours():
            self._path.unlink()
        self._close()

    def _try_lock(self, settled_by: float) -> bool:
        """Try to get the lock. Return False if the caller should retry.

        Args:
            settled_by: until this time, a lock without a live holder can belong to a new holder, whose record is not
                written yet.
        """
        self._descriptor = _open(self._path)
        try:
            granted = _flock(self._descriptor)
            holder = _read(self._path)
            if granted is None:
                _log.warning("The file system of %s has no locks: make sure that no other process writes to it.", self)
            if granted is False and not _is_alive(holder) and time.monotonic() < settled_by:
                self._close()
                return False
            elsewhere = holder is not None and (granted is None or not holder.is_of_this_kernel)
            if elsewhere:
                if not self._take_over and self._is_beating(holder):
                    raise self._refused(holder)
                if self._is_ours() is not None:  # None: the holder has ended and removed the file
                    self._replace_file()
            elif not granted and granted is not None:
                if not self._take_over:
                    raise self._refused(holder)
                if not self._end_holder(holder):
                    self._replace_file()
            if self._is_ours():
                self._write(0)
                return True
        except BaseException:
            self._close()
            raise
        self._close()  # another process has replaced or removed the file
        return False

    def _is_beating(self, holder: Holder | None) -> bool:
        """Return True if the holder writes a heartbeat within 30 seconds."""
        before = _text(self._path)
        _log.warning("%s may be in use by %s: watching for a heartbeat for up to %g s.", self, holder, _WATCH)
        for pause in retry.backoff(_POLL, _POLL, _WATCH):
            now = _text(self._path)
            if self._is_ours() is None:
                return False
            if now != before:
                return True
            time.sleep(pause)
        return False

    def _end_holder(self, holder: Holder | None) -> bool:
        """Send SIGTERM, then SIGKILL, to the holder. Return True if this process gets the lock."""
        if holder is None or not _is_alive(holder):  # the holder is in another container
            return False
        if holder.pid == os.getpid():
            raise UsageError(f"{self} is already in use by this process: it cannot take over from itself.")
        for number, seconds in ((signal.SIGTERM, holder.ends_within), (signal.SIGKILL, _KILL)):
            _log.warning("Taking %s over from %s: %s.", self, holder, number.name)
            with contextlib.suppress(ProcessLookupError):
                holder.send(number)
            for pause in retry.backoff(_POLL, _POLL, seconds):
                if _flock(self._descriptor):
                    return True
                time.sleep(pause)
        return False

    def _replace_file(self) -> None:
        """Replace the lock file with a new one. The old holder notices this at its next heartbeat, and ends."""
        self._close()
        # use a random name, because processes in different containers can have the same pid
        temporary = self._path.with_name(f"{NAME}.{secrets.token_hex(8)}")
        self._descriptor = _open(temporary)
        _flock(self._descriptor)
        self._write(0)
        os.replace(temporary, self._path)
        time.sleep(_HEARTBEAT)  # if several processes replace the file at the same time, the last process wins

    def _write(self, beat: int) -> None:
        record = json.dumps({**dataclasses.asdict(self._holder), "beat": beat}).encode()
        # If the disk is full, the lock works without the record, but error messages do not name the holder.
        with contextlib.suppress(OSError):
            if beat == 0:
                os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, record, 0)
            os.fdatasync(self._descriptor)  # on a network file system, this makes the record visible to other hosts

    def _write_heartbeats(self) -> None:
        beat = 0
        while not self._over.wait(_HEARTBEAT):
            beat += 1
            self._write(beat)
            if self._is_ours() is False:
                print(f"rlframe: {self} was taken over by {_read(self._path)}: exiting now.", file=sys.stderr)
                os._exit(1)

    def _is_ours(self) -> bool | None:
        """Return True if the directory still contains the lock file that is open here. None if it has no lock file."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except OSError:
            return None

    def _close(self) -> None:
        if self._descriptor >= 0:
            _open_descriptors.discard(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _refused(self, holder: Holder | None) -> UsageError:
        return UsageError(
            f"{self} is in use by {holder or 'another process'}. Wait for its end, stop it, or take over with "
            "--resume --take-over."
        )

    def __str__(self) -> str:
        return str(self._directory)


def holder_of(directory: pathlib.Path) -> Holder | None:
    """Return the process that holds the lock of a run directory, or None.

    A holder on another host counts as alive while its heartbeats are recent.
    """
    path = directory / NAME
    holder = _read(path)
    if holder is None or _is_alive(holder):
        return holder
    with contextlib.suppress(OSError):
        if not holder.is_of_this_kernel:  # the holder is on another host, or this host has been rebooted since
            return holder if time.time() - path.stat().st_mtime < _STALE else None
        with path.open() as file:
            try:  # the holder may be alive in another container
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return holder
    return None


def _open(path: pathlib.Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UsageError(f"Cannot write to {path}: {error.strerror}.") from error
    _open_descriptors.add(descriptor)
    return descriptor


def _flock(descriptor: int) -> bool | None:
    """Try to lock a file. Return whether this process has the lock now, or None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read(path: pathlib.Path) -> Holder | None:
    """Return the record in a lock file, or None if there is no valid record."""
    try:
        values: dict[str, Any] = json.loads(_text(path))
        del values["beat"]
        return Holder(**values)
    except (ValueError, TypeError, KeyError):
        return None


def _is_alive(holder: Holder | None) -> bool:
    """Return True if the holder is alive and visible. Processes in other containers are not visible."""
    return holder is not None and holder.is_of_this_kernel and ProcessId(holder.pid, holder.started).is_alive


def _boot_id() -> str:
    """Return the boot id of the running kernel, or the host name if there is none."""
    return _text(pathlib.Path("/proc/sys/kernel/random/boot_id")).strip() or socket.gethostname()
