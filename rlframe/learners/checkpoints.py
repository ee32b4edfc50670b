"""Checkpoints through Orbax: atomic, the last N kept, with clear errors."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import pickle
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from rlframe.errors import CheckpointError
from rlframe.interprocess.files import NativePath, write_atomically
from rlframe.streams import root_handler
from rlframe.types import Tree

# Versions are reserved in a file, so many at a time that writing it takes 1 part in 200 of the time: one where updates
# are slow. Then a learner that was killed skips none, and staleness counts what was published.
_COST = 200
_RESERVE = 1_000  # at most so many at a time
_FILE_BYTES = 64  # of the file that says so, always


class Checkpointer:
    """Saves trees of arrays under `directory/STEP`, each in full or not at all.

    Args:
        directory: created at the first save.
        keep: how many of the latest checkpoints stay.

    Attributes:
        directory: where the checkpoints lie.
    """

    def __init__(self, directory: str | os.PathLike, keep: int = 3) -> None:
        self.directory = pathlib.Path(directory).absolute()
        self._keep = keep
        self._open_manager: Any = None
        self._native: NativePath | None = None  # the directory's, for Orbax, while the manager is open

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, oldest first."""
        if not self.directory.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.directory.iterdir() if entry.name.isdigit())

    def save(self, step: int, tree: Tree, extras: Any = None) -> None:
        """Writes one checkpoint; the ones before it are untouched until it is complete.

        Args:
            step: names the checkpoint; the next free number does where one of this name exists, since
                nothing that was saved is ever overwritten.
            tree: a pytree of arrays, restored into the same structure.
            extras: any picklable object (counters, the actor's state).

        Raises:
            CheckpointError: it could not be written (disk full, no permission).
        """
        leaves = {f"{i:05d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
        pickled = np.frombuffer(pickle.dumps(extras, protocol=4), np.uint8)
        # Orbax checks its own indices, but not the arrays.
        sums = np.array([_checksum(array) for array in (*leaves.values(), pickled)], np.uint32)
        step = max([step, *(taken + 1 for taken in self.steps())])
        self._remove_unfinished()  # of a writer that was killed
        with self._explain("write", step):
            import orbax.checkpoint as ocp

            args = ocp.args.StandardSave({"leaves": leaves, "extras": pickled, "checksums": sums})
            self._manager().save(step, args=args, force=True)
            self._manager().wait_until_finished()

    def restore(self, template: Tree, step: int | None = None) -> tuple[Tree, Any]:
        """Reads the checkpoint of `step` (the latest one by default).

        Returns:
            (tree of numpy arrays in the structure of `template`, the extras).

        Raises:
            CheckpointError: there is none, it is damaged, or it is of another agent or network.
        """
        step = self._existing(step)
        leaves, extras = self._read(step)
        self._check(template, leaves, step)
        return jax.tree.unflatten(jax.tree.structure(template), leaves), extras

    def extras(self, step: int | None = None) -> Any:
        """Reads the checkpoint of `step` (the latest one by default) in full, for the extras saved with it.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        return self._read(self._existing(step))[1]

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"There is no checkpoint in {self.directory}. Start the run without resuming.")
        if step is not None and step not in steps:
            there = ", ".join(map(str, steps))
            raise CheckpointError(f"There is no checkpoint {step} in {self.directory}; there are {there}.")
        return steps[-1] if step is None else step

    def _read(self, step: int) -> tuple[list[np.ndarray], Any]:
        with self._explain("read", step):
            import orbax.checkpoint as ocp

            saved = self._manager().restore(step, args=ocp.args.StandardRestore())
            leaves = [np.asarray(saved["leaves"][name]) for name in sorted(saved["leaves"])]
            pickled = np.asarray(saved["extras"])
            if [_checksum(array) for array in (*leaves, pickled)] != np.asarray(saved["checksums"]).tolist():
                raise ValueError("its arrays are not the ones that were saved")
            return leaves, pickle.loads(pickled.tobytes())

    def close(self) -> None:
        """End Orbax's threads."""
        manager, native = self._open_manager, self._native
        self._open_manager = self._native = None
        with root_handler(logging.lastResort or logging.NullHandler()), contextlib.ExitStack() as closing:
            for each in filter(None, (native, manager)):  # the manager first
                closing.callback(each.close)

    def _manager(self) -> Any:
        if self._open_manager is None:
            import orbax.checkpoint as ocp

            # Orbax warns of every restore without a template; the arrays are checked against one in `_check`.
            logging.getLogger("absl").addFilter(lambda record: "expects a target tree" not in record.getMessage())
            self.directory.mkdir(parents=True, exist_ok=True)
            options = ocp.CheckpointManagerOptions(max_to_keep=self._keep, enable_async_checkpointing=False)
            self._native = NativePath(self.directory)
            self._open_manager = ocp.CheckpointManager(self._native.path, options=options)
        return self._open_manager

    def _check(self, template: Tree, leaves: list[np.ndarray], step: int) -> None:
        expected = jax.tree.leaves_with_path(template)
        if len(expected) != len(leaves):
            raise CheckpointError(
                f"Checkpoint {self.directory / str(step)} holds {len(leaves)} arrays where this agent has "
                f"{len(expected)}. It was written by another agent or network: resume with the run's own config.json."
            )
        for (path, want), got in zip(expected, leaves, strict=True):
            if np.shape(want) != got.shape:
                raise CheckpointError(
                    f"Checkpoint {self.directory / str(step)}: {jax.tree_util.keystr(path)} has shape {got.shape} "
                    f"where this agent has {np.shape(want)}. Resume with the run's own config.json."
                )

    def _remove_unfinished(self) -> None:
        for unfinished in self.directory.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    @contextlib.contextmanager
    def _explain(self, what: str, step: int) -> Iterator[None]:
        try:
            with root_handler(logging.lastResort or logging.NullHandler()):
                yield
        except Exception as error:
            path = self.directory / str(step)
            if what == "write":
                self._remove_unfinished()
                with contextlib.suppress(Exception):  # the next try has a new manager: this one may be in any state
                    self.close()
            others = [self.directory / str(other) for other in self.steps() if other != step]
            kept = f" The last good checkpoint is {others[-1]}." if others else ""
            if what == "read":
                raise CheckpointError(f"Checkpoint {path} is damaged: {_first_line(error)}.") from error
            free = _free_megabytes(self.directory)
            hint = f" Only {free:.1f} MB are free there: make room." if free < 1_000 else ""
            raise CheckpointError(f"Cannot write checkpoint {path}: {_first_line(error)}.{kept}{hint}") from error


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).tobytes())


def _first_line(error: Exception) -> str:
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:160].rstrip(".")


def _free_megabytes(directory: pathlib.Path) -> float:
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free / 1e6


class VersionCounter:
    """A counter whose values are never given twice, also after a crash.

    Values are reserved in a small file before they are used; a restart goes on past all that were
    reserved, a clean stop gives the unused ones back.

    Args:
        directory: where `versions.json` is kept; None keeps nothing.
        may_write: called before that file is written: what it raises is raised, and nothing is written.
    """

    def __init__(self, directory: str | os.PathLike | None, may_write: Callable[[], None] | None = None) -> None:
        self._may_write = may_write or (lambda: None)
        self._path = pathlib.Path(directory) / "versions.json" if directory is not None else None
        # The first value needs no reservation: nothing is written before there is something to resume.
        self._reserved = self.value = 1
        self._written, self._cost = (0, 0.0), 0.0  # at the last reservation: (value, time); seconds that it took

    def next(self) -> int:
        """Counts one up and returns it."""
        self.value += 1
        if self._path is not None and self.value > self._reserved:
            self._reserve(self.value + self._ahead())
        return self.value

    def _ahead(self) -> int:
        """How many to reserve beyond the next."""
        (value, at), now = self._written, time.monotonic()
        self._written = self.value, now
        part = self._cost * (self.value - value) / max(now - at, 1e-6)  # of the time that a write for each takes
        return min(_RESERVE, int(part * _COST)) if value else 0

    def skip(self, value: int) -> None:
        """Goes on above `value`, which another counter gave."""
        self.value = max(self.value, value)
        self.next()

    def release(self) -> None:
        """Gives back what was reserved beyond `value`: after a save that nothing follows."""
        if self._path is not None and self._reserved != self.value:
            self._reserve(self.value)

    def resume(self, value: int) -> None:
        """Goes on from a checkpoint's `value`, or past every value that may have been given since."""
        self.value = value
        if self._path is not None and self._path.exists():
            try:
                self._reserved = int(json.loads(self._path.read_text())["reserved"])
            except (ValueError, KeyError, TypeError, OSError) as error:
                raise CheckpointError(
                    f'{self._path} is damaged: {type(error).__name__}: {error}. It must hold {{"reserved": N}}, where '
                    "N is at least the newest version of the parameters that anybody may know (params_version in the "
                    "run's logs)."
                ) from error
            # Equal after a clean stop. Otherwise every value up to the reserved one may have been given.
            self.value = value if value == self._reserved else max(value, self._reserved) + 1

    def _reserve(self, upto: int) -> None:
        assert self._path is not None
        self._may_write()
        began = time.perf_counter()
        try:
            text = json.dumps({"reserved": upto}).ljust(_FILE_BYTES)
            try:
                write_atomically(self._path, text, parents=True)
            except OSError:  # a full disk: what is there has room for it
                with self._path.open("r+") as file:
                    file.write(text)
        except OSError as error:
            raise CheckpointError(f"Cannot write {self._path}: {error}. Free some space, then resume.") from error
        self._reserved, self._cost = upto, time.perf_counter() - began
