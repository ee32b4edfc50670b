"""The lock of a run directory. Real processes hold the lock."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from rlframe.errors import UsageError
from rlframe.programs.run_dir import lock
from rlframe.programs.run_dir.lock import NAME, RunLock, holder_of
from tests.waiting import wait_until

HOLD = """
import multiprocessing, os, pathlib, signal, sys, time
from rlframe.programs.run_dir.lock import RunLock

def write_late(lock, beat):
    print("locked", flush=True)
    sys.stdin.readline()
    write(lock, beat)

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
write = RunLock._write
if "late" in sys.argv:
    RunLock._write = write_late
with RunLock(pathlib.Path(sys.argv[1]), ends_within=1.0 if "ignores_sigterm" in sys.argv else 30.0):
    if "ignores_sigterm" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "forks" in sys.argv:
        context = multiprocessing.get_context("fork")
        begun = context.Event()
        child = context.Process(target=lambda: (begun.set(), time.sleep(600)))
        child.start()
        begun.wait()
        print("forked", child.pid)
    print("held", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def holder(directory: pathlib.Path, *how: str) -> Iterator[subprocess.Popen[str]]:
    """Start another process that locks the run directory. Kill it when the context ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory), *how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            if "forks" not in how:
                assert process.stdout.readline() == ("locked\n" if "late" in how else "held\n")
            yield process
        finally:
            process.kill()


def refused(directory: pathlib.Path, take_over: bool = False) -> str:
    with pytest.raises(UsageError) as caught, RunLock(directory, take_over):
        pass
    return str(caught.value)


def test_error_about_a_locked_directory_contains_the_process_with_the_lock(tmp_path):
    with holder(tmp_path) as process:
        assert f"{tmp_path} is in use by process {process.pid} on " in refused(tmp_path)
        assert "--take-over" in refused(tmp_path)


def once_read(monkeypatch, then) -> None:
    """Call `then` after `RunLock` has read the lock file for the first time."""
    read, calls = lock._read, []

    def reading(path: pathlib.Path) -> lock.Holder | None:
        found = read(path)
        if not calls:
            calls.append(then())
        return found

    monkeypatch.setattr(lock, "_read", reading)


@pytest.mark.parametrize("take_over", [False, True])
def test_lock_waits_until_its_holder_has_written_the_lock_file(tmp_path, monkeypatch, take_over):
    with holder(tmp_path, "late") as process:
        once_read(monkeypatch, lambda: print(file=process.stdin, flush=True))
        if take_over:
            with RunLock(tmp_path, take_over=True):
                assert process.wait(timeout=60.0) == 0  # the holder exited after SIGTERM, so it could save
        else:
            assert f"is in use by process {process.pid} on" in refused(tmp_path)


def test_process_gets_the_lock_of_an_ended_process_while_another_process_reads_it(tmp_path, monkeypatch):
    with holder(tmp_path) as process:
        pass
    assert f'"pid": {process.pid}' in (tmp_path / NAME).read_text()
    with (tmp_path / NAME).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # like `holder_of`
        once_read(monkeypatch, lambda: fcntl.flock(file, fcntl.LOCK_UN))
        with RunLock(tmp_path):
            pass


def test_released_lock_leaves_no_files(tmp_path):
    with RunLock(tmp_path):
        assert f"process {os.getpid()} on" in refused(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert not list(tmp_path.iterdir())


def test_lock_of_a_killed_process_is_free_even_if_its_forked_child_lives(tmp_path):
    with holder(tmp_path, "forks") as process:
        assert process.stdout is not None
        child = int(process.stdout.readline().split()[1])
        assert process.stdout.readline() == "held\n"
        try:
            process.kill()
            process.wait()
            with RunLock(tmp_path):
                os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_process_keeps_the_lock_after_its_forked_child_exits(tmp_path):
    with RunLock(tmp_path):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        assert "is in use by" in refused(tmp_path)


@pytest.mark.parametrize("how", ["", "ignores_sigterm"])
def test_take_over_ends_the_process_that_holds_the_lock(tmp_path, how):
    with holder(tmp_path, how) as process, RunLock(tmp_path, take_over=True):
        assert process.wait(timeout=60.0) == (-signal.SIGKILL if how else 0)
        assert f"process {os.getpid()} on" in refused(tmp_path)


def test_process_cannot_take_over_from_itself(tmp_path):
    with RunLock(tmp_path):
        assert "cannot take over from itself" in refused(tmp_path, take_over=True)


def test_one_of_two_concurrent_processes_gets_the_lock(tmp_path):
    code = HOLD.replace('print("held", flush=True)\n    time.sleep(600)', "print('held', flush=True); sys.stdin.read()")
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        ended = wait_until(lambda: [process for process in both if process.poll() is not None])
        assert len(ended) == 1
        other = both[1 - both.index(ended[0])]
        # It is possible that the holder has not written its process ID to the lock file.
        assert re.search(rf"is in use by (process {other.pid} on|another process)", ended[0].communicate()[1])
        assert other.communicate()[0] == "held\n"
    finally:
        for process in both:
            process.kill()
            process.communicate()


class RemoteHolder:
    """A simulated process on another host that holds the lock. This host sees its heartbeats, but not its file lock.

    Args:
        directory: The run directory.
        is_alive: True if the process is alive and writes heartbeats.
    """

    def __init__(self, directory: pathlib.Path, is_alive: bool) -> None:
        self._path = directory / NAME
        self._path.write_text(self._record(0))
        self._over, self._is_alive = threading.Event(), is_alive
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> RemoteHolder:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _record(self, beat: int) -> str:
        # This process ID also exists on this host. The lock must ignore that process.
        holder = {"pid": os.getppid(), "started": 1, "host": "far", "boot": "another kernel's", "since": "noon"}
        return json.dumps({**holder, "ends_within": 30.0, "beat": beat})

    def _run(self) -> None:
        beat = 0
        with self._path.open("r+") as file:
            while self._is_alive and not self._over.wait(0.1):
                beat += 1
                file.seek(0)
                file.write(self._record(beat))
                file.flush()


def test_process_on_another_host_keeps_the_lock_while_its_heartbeat_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_HEARTBEAT", 0.1)
    with RemoteHolder(tmp_path, is_alive=True):
        assert f"is in use by process {os.getppid()} on far, since noon" in refused(tmp_path)
        with RunLock(tmp_path, take_over=True):
            assert f"process {os.getpid()} on" in refused(tmp_path)


def test_process_on_another_host_loses_the_lock_if_its_heartbeat_stops(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_HEARTBEAT", 0.1)
    monkeypatch.setattr(lock, "_WATCH", 0.5)
    with RemoteHolder(tmp_path, is_alive=False):
        began = time.monotonic()
        with RunLock(tmp_path):
            assert time.monotonic() - began > 0.5


def test_lock_is_free_when_a_process_on_another_host_releases_it(tmp_path, caplog):
    def end() -> None:
        while "watching" not in caplog.text:
            time.sleep(0.01)
        (tmp_path / NAME).unlink()

    with RemoteHolder(tmp_path, is_alive=False):
        thread = threading.Thread(target=end)
        thread.start()
        with RunLock(tmp_path):
            assert f"process {os.getpid()} on" in refused(tmp_path)
        thread.join()


def test_take_over_works_if_another_container_has_the_same_pid(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_HEARTBEAT", 0.1)
    (tmp_path / f"{NAME}.{os.getpid()}").write_text("the other's")
    with RemoteHolder(tmp_path, is_alive=False), RunLock(tmp_path, take_over=True):
        assert (tmp_path / f"{NAME}.{os.getpid()}").read_text() == "the other's"


def test_lock_of_another_host_with_an_old_heartbeat_is_ignored(tmp_path):
    with RemoteHolder(tmp_path, is_alive=False):
        found = holder_of(tmp_path)
        assert found is not None and found.host == "far"
        os.utime(tmp_path / NAME, (0, time.time() - 200.0))
        assert holder_of(tmp_path) is None


def test_process_of_another_user_or_container_cannot_be_stopped(tmp_path, monkeypatch):
    def kill(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with RunLock(tmp_path):
        found = holder_of(tmp_path)
    assert found is not None
    with pytest.raises(UsageError, match="probably in another container. Stop it in that container"):
        dataclasses.replace(found, started=found.started - 1).terminate()
    monkeypatch.setattr(os, "kill", kill)
    with pytest.raises(UsageError, match="which another user started. You cannot stop it"):
        found.terminate()


OTHER_KERNEL = "from rlframe.programs.run_dir import lock\nlock._HEARTBEAT = 0.1\nlock._boot_id = lambda: 'another'\n"


def test_suspended_process_exits_if_it_has_lost_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_HEARTBEAT", 0.1)
    monkeypatch.setattr(lock, "_WATCH", 0.5)
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_KERNEL + HOLD, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
            with RunLock(tmp_path):
                process.send_signal(signal.SIGCONT)
                error = process.communicate(timeout=60.0)[1]
                assert process.returncode == 1
                assert f"{tmp_path} was taken over by process {os.getpid()} on" in error
        finally:
            process.kill()


def test_file_system_without_locks_logs_a_warning(tmp_path, monkeypatch, caplog):
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunLock(tmp_path):
        assert f"The file system of {tmp_path} has no locks" in caplog.text
        monkeypatch.setattr(lock, "_HEARTBEAT", 0.1)
    with RunLock(tmp_path):  # the heartbeats still protect the directory
        assert "is in use by" in refused(tmp_path)
