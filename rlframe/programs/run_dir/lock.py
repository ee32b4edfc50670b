"""The lock of a run directory: one process at a time writes to it."""

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

_BEAT = 5.0  # seconds between two beats of a holder
_STILL = 30.0  # seconds without a beat after which a holder on another host counts as dead
_SILENT = 120.0  # the same where the beat's time is all that is known, by the clock of that host
_LOOK = 0.05  # seconds between two looks at a lock that is waited for
_SETTLES = 1.0  # seconds in which a new holder writes its record, and `holder_of` releases the lock
_KILLED = 10.0  # seconds that a holder has to end after SIGKILL

_log = logging.getLogger(__name__)

_open_descriptors: set[int] = set()


def _close_in_child() -> None:
    # A lock of flock() lives as long as any copy of its descriptor: a child that is forked must not keep it.
    for descriptor in _open_descriptors:
        os.close(descriptor)
    _open_descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)


@dataclasses.dataclass(frozen=True)
class Holder:
    """The record that the holder of a lock writes into its file."""

    pid: int
    started: int  # see `ProcessId`
    host: str
    boot: str  # of the host's kernel: containers of one machine have it in common, and so do the kernel's locks
    since: str  # a time, for a reader
    ends_within: float  # seconds that it has to end after SIGTERM

    @staticmethod
    def this(ends_within: float) -> Holder:
        """This process."""
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return Holder(os.getpid(), this_process().started, socket.gethostname(), _boot_id(), since, ends_within)

    @property
    def is_of_this_kernel(self) -> bool:
        """Return True if our kernel gave the holder its lock."""
        return self.boot == _boot_id()

    def terminate(self) -> None:
        """Send SIGTERM. Raise `UsageError` if the process cannot be reached from here."""
        if not self.is_of_this_kernel:
            raise UsageError(f"The run is that of {self}: stop it on that host.")
        if not ProcessId(self.pid, self.started).is_alive:
            raise UsageError(f"The run is that of {self}, in another container it seems: stop it in there.")
        self.send(signal.SIGTERM)

    def send(self, number: int) -> None:
        """Signal the process. Raise `UsageError` if it is another user's."""
        try:
            os.kill(self.pid, number)
            os.kill(self.pid, signal.SIGCONT)  # a process that was stopped handles no signal
        except PermissionError as error:
            raise UsageError(f"The run is that of {self}, which is another user's: it is not ours to stop.") from error

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class RunLock:
    """A context in which this process is the only writer of a run directory.

    The kernel releases the lock when its holder dies for any reason. Locks may not reach other hosts, so a holder there
    counts as alive while the beat in its record changes.

    Args:
        directory: of the run; it exists.
        take_over: end the holder, if there is one: SIGTERM, so that it saves, then SIGKILL. Replace the lock of a
            holder that cannot be reached: it ends itself, without saving, at its next beat.
        ends_within: seconds from SIGTERM to SIGKILL if another process takes over from this one.

    Raises:
        UsageError: another process has it.
    """

    def __init__(self, directory: pathlib.Path, take_over: bool = False, ends_within: float = 30.0) -> None:
        self._directory, self._path = directory, directory / NAME
        self._take_over = take_over
        self._descriptor = -1
        self._owner = os.getpid()
        self._holder = Holder.this(ends_within)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="rlframe lock", daemon=True)

    def __enter__(self) -> RunLock:
        settled_by = time.monotonic() + _SETTLES
        while not self._try(settled_by):
            time.sleep(_LOOK)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if os.getpid() != self._owner:  # a forked child on its way out
            return
        self._over.set()
        self._thread.join()
        if self._is_ours():
            self._path.unlink()
        self._close()

    def _try(self, settled_by: float) -> bool:
        """Try once to get the lock. Return False if the caller should try again.

        Args:
            settled_by: until this time, a lock whose holder is not alive may be changing hands.
        """
        self._descriptor = _open(self._path)
        try:
            granted = _flock(self._descriptor)
            holder = _read(self._path)
            if granted is None:
                _log.warning("The file system of %s has no locks: see to it that no other process writes to it.", self)
            if granted is False and not _is_alive(holder) and time.monotonic() < settled_by:
                self._close()
                return False
            elsewhere = holder is not None and (granted is None or not holder.is_of_this_kernel)
            if elsewhere:
                if not self._take_over and self._beats(holder):
                    raise self._refused(holder)
                if self._is_ours() is not None:  # else its holder has ended, and removed it
                    self._replace()
            elif not granted and granted is not None:
                if not self._take_over:
                    raise self._refused(holder)
                if not self._end(holder):
                    self._replace()
            if self._is_ours():
                self._write(0)
                return True
        except BaseException:
            self._close()
            raise
        self._close()  # another process has replaced or removed it
        return False

    def _beats(self, holder: Holder | None) -> bool:
        """Watch the holder's beat for up to 30 s. Return True as soon as it changes."""
        before = _text(self._path)
        _log.warning("%s may be in use by %s: watching for up to %g s.", self, holder, _STILL)
        for pause in retry.backoff(_LOOK, _LOOK, _STILL):
            now = _text(self._path)
            if self._is_ours() is None:
                return False
            if now != before:
                return True
            time.sleep(pause)
        return False

    def _end(self, holder: Holder | None) -> bool:
        """End the holder. Return True if its lock is ours then (or its file is gone)."""
        if holder is None or not _is_alive(holder):  # it is in another container
            return False
        if holder.pid == os.getpid():
            raise UsageError(f"{self} is in use by this process: it cannot take it over from itself.")
        for number, seconds in ((signal.SIGTERM, holder.ends_within), (signal.SIGKILL, _KILLED)):
            _log.warning("Taking %s over from %s: %s.", self, holder, number.name)
            with contextlib.suppress(ProcessLookupError):
                holder.send(number)
            for pause in retry.backoff(_LOOK, _LOOK, seconds):
                if _flock(self._descriptor):
                    return True
                time.sleep(pause)
        return False

    def _replace(self) -> None:
        """Replace the file by a new one. The old one's holder ends when it notices."""
        self._close()
        temporary = self._path.with_name(f"{NAME}.{secrets.token_hex(8)}")  # pids of containers may be the same
        self._descriptor = _open(temporary)
        _flock(self._descriptor)
        self._write(0)
        os.replace(temporary, self._path)
        time.sleep(_BEAT)  # of several processes that do this at the same time, the last one stays

    def _write(self, beat: int) -> None:
        record = json.dumps({**dataclasses.asdict(self._holder), "beat": beat}).encode()
        # On a full disk only the message of a refusal lacks the holder.
        with contextlib.suppress(OSError):
            if beat == 0:
                os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, record, 0)
            os.fdatasync(self._descriptor)  # so that other hosts see it on a network file system

    def _beat(self) -> None:
        beat = 0
        while not self._over.wait(_BEAT):
            beat += 1
            self._write(beat)
            if self._is_ours() is False:
                print(f"rlframe: {self} was taken over by {_read(self._path)}: ending at once.", file=sys.stderr)
                os._exit(1)

    def _is_ours(self) -> bool | None:
        """Return True if the file in the directory is the one that we have open; None if there is none."""
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
            f"{self} is in use by {holder or 'another process'}: wait for its end, stop it, or have it ended and go on "
            "in its place by --resume --take-over."
        )

    def __str__(self) -> str:
        return str(self._directory)


def holder_of(directory: pathlib.Path) -> Holder | None:
    """Return the current writer of a run directory, if any. One on another host counts while its beat changes."""
    path = directory / NAME
    holder = _read(path)
    if holder is None or _is_alive(holder):
        return holder
    with contextlib.suppress(OSError):
        if not holder.is_of_this_kernel:  # of another host, or of this one before it was rebooted
            return holder if time.time() - path.stat().st_mtime < _SILENT else None
        with path.open() as file:
            try:  # it may be in another container
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
    """Try to lock a file. Return whether we have the lock now; None if the file system has no locks."""
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
    """Return the record in the file; None if there is none."""
    try:
        values: dict[str, Any] = json.loads(_text(path))
        del values["beat"]
        return Holder(**values)
    except (ValueError, TypeError, KeyError):
        return None


def _is_alive(holder: Holder | None) -> bool:
    """Return True if the process is alive and visible from here: one in another container is not."""
    return holder is not None and holder.is_of_this_kernel and ProcessId(holder.pid, holder.started).is_alive


def _boot_id() -> str:
    """Return an id of the running kernel; the host's name if the kernel has none."""
    return _text(pathlib.Path("/proc/sys/kernel/random/boot_id")).strip() or socket.gethostname()
