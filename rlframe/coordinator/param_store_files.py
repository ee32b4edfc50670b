"""A param store in a directory: a file for each version, for processes that share a file system.

A file is a magic line, the length and the CRC-32 of what follows, and that: a pickle. So the directory is one that
nobody writes to who may not run code here, as a run's is.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from rlframe.coordinator.param_store import (
    LONGEST_WAIT,
    PINS,
    Attempt,
    ParamStore,
    StoredParams,
    check_attempt,
    check_rises,
)
from rlframe.errors import CheckpointError, PeerError, StoppedError, UsageError
from rlframe.interprocess import locks
from rlframe.interprocess.files import write_atomically
from rlframe.types import Tree

_MAGIC = b"rlframe policy 1\n"
_LENGTHS = struct.Struct("<QI")
_POLICY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_NAME = re.compile(r"(\d{12,})\.params")
_PIN = re.compile(r"(\d{12,})\.pinned")
_TEMPORARY = re.compile(r"\..*\.\d+\.new")
_OPENED = "opened.json"  # which attempt may put
_LOOK = 0.02  # seconds between two looks into the directory
_LOCK_TIMEOUT = 30.0  # seconds; a put takes milliseconds


class FileParamStore(ParamStore):
    """Policies in files, `directory/POLICY_ID/VERSION.params`. Picklable.

    Args:
        directory: made where it is not there.
        kept: versions of each policy.
    """

    def __init__(self, directory: str | os.PathLike[str], kept: int = 4) -> None:
        if kept < 1:
            raise UsageError(f"A FileParamStore keeps at least one version, got kept={kept}.")
        self._directory, self.kept = Path(directory).absolute(), kept
        self._closed = False
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"The param store's directory {directory} cannot be made: {error}.") from error

    def open(self, policy_id: str, attempt: Attempt) -> None:
        """See `ParamStore`. It is kept in `POLICY_ID/opened.json`, and so outlives all processes.

        Raises:
            FencedError: a newer one has.
            CheckpointError: that file cannot be read or written.
        """
        folder = self._folder(policy_id)
        try:
            folder.mkdir(exist_ok=True)
            with _writing(folder):
                opened = self.opened(policy_id)
                check_attempt(policy_id, attempt, opened)
                if attempt != opened:
                    _write(folder / _OPENED, json.dumps(attempt._asdict()).encode())
        except OSError as error:
            raise CheckpointError(f"Policy {policy_id!r} could not be opened in {folder}: {error}.") from error

    def opened(self, policy_id: str) -> Attempt | None:
        path = self._folder(policy_id) / _OPENED
        try:
            saved = json.loads(path.read_bytes())
            return Attempt(int(saved["epoch"]), int(saved["number"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} is damaged: {type(error).__name__}: {error}. It says which attempt may put the policy: "
                '{"epoch": N, "number": N}. Remove it once no learner of it runs any more.'
            ) from error

    def _put(self, policy_id: str, version: int, params: Tree, hparams: bytes, attempt: Attempt | None) -> None:
        if self._closed:
            raise StoppedError(f"The param store was closed before version {version} of {policy_id!r} was put.")
        content = pickle.dumps((policy_id, version, jax.tree.map(np.asarray, params), hparams), protocol=5)
        folder = self._folder(policy_id)
        try:
            folder.mkdir(exist_ok=True)
            with _writing(folder):
                check_attempt(policy_id, attempt, self.opened(policy_id))
                check_rises(policy_id, version, max(self._listed(policy_id), default=-1))
                head = _MAGIC + _LENGTHS.pack(len(content), zlib.crc32(content))
                _write(self._path(policy_id, version), head, content)
                self._remove_old(policy_id)
        except OSError as error:
            raise CheckpointError(
                f"Version {version} of policy {policy_id!r} could not be written to {folder}: {error}."
            ) from error

    def get(self, policy_id: str, min_version: int = -1, *, version: int | None = None) -> StoredParams | None:
        """See `ParamStore`.

        Raises:
            CheckpointError: the version's file is damaged, or something else.
        """
        while True:  # again only where the version was removed since the directory was read
            there = self.versions(policy_id)
            wanted = max(there, default=-1) if version is None else version
            if wanted not in there or wanted < min_version:
                return None
            with contextlib.suppress(FileNotFoundError):
                return _read(self._path(policy_id, wanted), policy_id, wanted)

    def pin(self, policy_id: str) -> int:
        folder = self._folder(policy_id)
        if not self._listed(policy_id):
            return -1
        with _writing(folder):
            newest = self._listed(policy_id)[-1]
            for version in [each for each in self._pinned(policy_id) if each != newest][: 1 - PINS or None]:
                self._pin_path(policy_id, version).unlink(missing_ok=True)
            self._pin_path(policy_id, newest).touch()
            self._remove_old(policy_id)
            return newest

    def unpin(self, policy_id: str, version: int) -> None:
        if version in self._pinned(policy_id):
            with _writing(self._folder(policy_id)):
                self._pin_path(policy_id, version).unlink(missing_ok=True)
                self._remove_old(policy_id)

    def _remove_old(self, policy_id: str) -> None:
        """Removes the versions that need not be kept; the caller holds the right to write."""
        there, pinned = self._listed(policy_id), self._pinned(policy_id)
        for old in there[: -self.kept]:
            if old not in pinned:
                self._path(policy_id, old).unlink(missing_ok=True)

    def versions(self, policy_id: str) -> list[int]:
        there, pinned = self._listed(policy_id), self._pinned(policy_id)
        return [version for version in there if version in there[-self.kept :] or version in pinned]

    def wait_for_version(self, policy_id: str, known: int, timeout: float) -> int:
        deadline = time.monotonic() + min(timeout, LONGEST_WAIT)
        while True:
            newest, left = self.newest(policy_id), deadline - time.monotonic()
            if newest > known:
                return newest
            if self._closed:
                raise StoppedError(f"The param store was closed while a version of {policy_id!r} was waited for.")
            if left <= 0:
                return newest
            time.sleep(min(left, _LOOK))

    def close(self) -> None:
        """Ends what waits in this process. The files stay."""
        self._closed = True

    def _check_policy(self, policy_id: str) -> None:
        if not _POLICY.fullmatch(policy_id):
            raise UsageError(
                f"The name of a policy is a directory's: letters, digits, '_', '.' and '-', at most 100 of them and "
                f"beginning with none of the last two. Got {policy_id!r}."
            )

    def _folder(self, policy_id: str) -> Path:
        self._check_policy(policy_id)
        return self._directory / policy_id

    def _path(self, policy_id: str, version: int) -> Path:
        return self._folder(policy_id) / f"{version:012d}.params"

    def _pin_path(self, policy_id: str, version: int) -> Path:
        return self._folder(policy_id) / f"{version:012d}.pinned"

    def _listed(self, policy_id: str) -> list[int]:
        """The versions that there are files of, in order."""
        return self._numbers(policy_id, _NAME)

    def _pinned(self, policy_id: str) -> list[int]:
        """The versions that are pinned, in order."""
        return self._numbers(policy_id, _PIN)

    def _numbers(self, policy_id: str, kind: re.Pattern[str]) -> list[int]:
        try:
            names = os.listdir(self._folder(policy_id))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"The versions of policy {policy_id!r} cannot be listed: {error}.") from error
        return sorted(int(match[1]) for match in map(kind.fullmatch, names) if match)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Held by one process at a time."""

    def overdue() -> Exception:
        return PeerError(
            f"Another process has been putting parameters into {folder} for {_LOCK_TIMEOUT:.0f} s: it was stopped "
            "(SIGSTOP) meanwhile. Let it go on, or kill it."
        )

    with open(folder / ".lock", "wb") as file, locks.held(file.fileno(), _LOCK_TIMEOUT, overdue):
        yield


def _write(path: Path, *contents: bytes) -> None:
    """Writes a file in full, or leaves it as it is; the caller holds the right to write."""
    folder = path.parent
    for name in os.listdir(folder):  # of processes that died while they wrote
        if _TEMPORARY.fullmatch(name):
            (folder / name).unlink()
    write_atomically(path, *contents, sync=True)


def _read(path: Path, policy_id: str, version: int) -> StoredParams:
    """Raises `FileNotFoundError`, and `CheckpointError` for whatever else is the matter."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} could not be read: {error}.") from error
    begin = len(_MAGIC) + _LENGTHS.size
    if not content.startswith(_MAGIC) or len(content) < begin:
        raise CheckpointError(f"{path} is damaged, or no policy that rlframe wrote. Remove it.")
    length, crc = _LENGTHS.unpack(content[len(_MAGIC) : begin])
    body = memoryview(content)[begin:]
    if len(body) != length or zlib.crc32(body) != crc:
        raise CheckpointError(
            f"{path} is damaged: {len(body)} of {length} bytes, or others than were written. Remove it."
        )
    try:
        whose, written, params, hparams = pickle.loads(body)
    except Exception as error:  # classes of the agent's that this process does not know, say
        raise CheckpointError(f"{path} holds what cannot be read here: {type(error).__name__}: {error}.") from error
    if (whose, written) != (policy_id, version):
        raise CheckpointError(f"{path} holds version {written} of policy {whose!r}: it was moved. Remove it.")
    return StoredParams(version, params, json.loads(hparams))
