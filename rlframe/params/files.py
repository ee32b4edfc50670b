"""A param store in a directory: a file for each version, for processes that share a file system.

A file is a magic line, the length and the CRC-32 of what follows, and that: a pickle. So the directory is one that
nobody writes to who may not run code here, as a run's is.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from rlframe.errors import CheckpointError, UsageError
from rlframe.interprocess.files import write_atomically
from rlframe.interprocess.memory import held
from rlframe.params import store
from rlframe.params.packing import PackedParams
from rlframe.params.store import Attempt, ParamStore, overdue

_MAGIC = b"rlframe policy 2\n"
_LENGTHS = struct.Struct("<QI")
_POLICY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_NAME = re.compile(r"(\d{12,})\.params")
_TEMPORARY = re.compile(r"\..*\.\d+\.new")
_OPENED = "opened.json"  # which attempt may put


class FileParamStore(ParamStore):
    """Policies in files, `directory/POLICY_ID/VERSION.params`. Picklable.

    Args:
        directory: made where it is not there.
        kept: versions of each policy.
    """

    def __init__(self, directory: str | os.PathLike[str], kept: int = 4) -> None:
        super().__init__(kept)
        self._directory = Path(directory).absolute()
        self._closed = False
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"The param store's directory {directory} cannot be made: {error}.") from error

    def opened(self, policy_id: str) -> Attempt | None:
        """See `ParamStore`. It is kept in `POLICY_ID/opened.json`, and so outlives all processes."""
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

    def close(self) -> None:
        """Ends what waits in this process. The files stay."""
        self._closed = True

    @contextlib.contextmanager
    def _writing(self, policy_id: str) -> Iterator[None]:
        folder = self._folder(policy_id)
        with contextlib.ExitStack() as stack:
            try:
                folder.mkdir(exist_ok=True)
                lock = stack.enter_context(open(folder / ".lock", "wb"))
            except OSError as error:
                raise CheckpointError(f"Policy {policy_id!r} cannot be written to {folder}: {error}.") from error
            late = functools.partial(overdue, f" into {folder}")
            stack.enter_context(held(lock.fileno(), store.LOCK_TIMEOUT, late))
            yield

    def _set_opened(self, policy_id: str, attempt: Attempt) -> None:
        try:
            _write(self._folder(policy_id) / _OPENED, json.dumps(attempt._asdict()).encode())
        except OSError as error:
            raise CheckpointError(f"Policy {policy_id!r} could not be opened: {error}.") from error

    def _prepare(self, policy_id: str, version: int, packed: PackedParams, hparams: bytes) -> tuple[bytes, bytes]:
        content = pickle.dumps((policy_id, version, packed, hparams), protocol=5)
        return _MAGIC + _LENGTHS.pack(len(content), zlib.crc32(content)), content

    def _write(self, policy_id: str, version: int, prepared: tuple[bytes, bytes]) -> None:
        path = self._path(policy_id, version)
        try:
            _write(path, *prepared)
        except OSError as error:
            raise CheckpointError(
                f"Version {version} of policy {policy_id!r} could not be written to {path.parent}: {error}."
            ) from error

    def _read(self, policy_id: str, version: int) -> tuple[PackedParams, bytes] | None:
        path = self._path(policy_id, version)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
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
            whose, written, packed, hparams = pickle.loads(body)
        except Exception as error:  # classes of the agent's that this process does not know, say
            raise CheckpointError(f"{path} holds what cannot be read here: {type(error).__name__}: {error}.") from error
        if (whose, written) != (policy_id, version):
            raise CheckpointError(f"{path} holds version {written} of policy {whose!r}: it was moved. Remove it.")
        return packed, hparams

    def _set_pinned(self, policy_id: str, version: int, pinned: bool) -> None:
        path = self._folder(policy_id) / _pin(version)
        if pinned:
            path.touch()
        else:
            path.unlink(missing_ok=True)

    def _drop_old(self, policy_id: str) -> None:
        for old in set(self._there(policy_id)).difference(self.versions(policy_id)):
            self._path(policy_id, old).unlink(missing_ok=True)

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

    def _there(self, policy_id: str) -> dict[int, bool]:
        try:
            names = os.listdir(self._folder(policy_id))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CheckpointError(f"The versions of policy {policy_id!r} cannot be listed: {error}.") from error
        versions = sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)
        return {version: _pin(version) in names for version in versions}


def _pin(version: int) -> str:
    """The name of the file that says that a version is pinned."""
    return f"{version:012d}.pinned"


def _write(path: Path, *contents: bytes) -> None:
    """Writes a file in full, or leaves it as it is; the caller holds the right to write."""
    folder = path.parent
    for name in os.listdir(folder):  # of processes that died while they wrote
        if _TEMPORARY.fullmatch(name):
            (folder / name).unlink()
    write_atomically(path, *contents, sync=True)
