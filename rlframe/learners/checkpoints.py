"""Save and restore checkpoints. A checkpoint contains a learner's arrays, and often its replay buffer.

- Each checkpoint is written completely or not at all.
- `Learner.run()` calls `Saver.save_if_due` after each update. `save_soon` saves from another thread, between updates.
- `Saver` decides by `checkpoint_every` and `checkpoint_seconds` whether to save. `ReplayFiles.is_due` decides whether
  to save the replay too.
- `Learner.save` collects the arrays. `Checkpointer.save` writes them.
- In a single-process run, the training loop (`rlframe/programs/training/loop.py`) decides by environment steps.

Orbax saves arrays and extras in `directory/STEP`. The replay buffer is saved in `directory/replay/STEP`, before its
checkpoint, so the newest checkpoint is complete even if a save is interrupted. A large replay is saved with only some
of the checkpoints. A checkpoint without a replay is restored with the newest older replay. `directory/best` has a copy
of the checkpoint with the best evaluation (saving.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import pickle
import shutil
import time
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from rlframe.errors import CheckpointError, RlframeError, UsageError
from rlframe.interprocess.files import NativePath
from rlframe.learners.saving import BestCheckpoint
from rlframe.replay.replay_files import ReplayFiles
from rlframe.streams import root_handler
from rlframe.types import Tree

_log = logging.getLogger(__name__)


class RestoredCheckpoint(NamedTuple):
    """The checkpoint that a learner was restored from."""

    # Object saved with the checkpoint, for example the counters of the actor. None for the initial checkpoint of a run.
    extras: Any
    has_replay: bool  # True if this checkpoint had a replay, and that replay was also restored


class SavedCheckpoint(NamedTuple):
    """The content of a checkpoint, without the replay."""

    path: pathlib.Path
    leaves: list[np.ndarray]  # arrays of the saved tree
    extras: Any  # object saved with the checkpoint

    def tree(self, template: Tree) -> Tree:
        """Return the arrays with the structure of `template`.

        Raises:
            CheckpointError: the shapes differ from `template`: another agent or network has written the checkpoint.
        """
        expected = jax.tree.leaves_with_path(template)
        if len(expected) != len(self.leaves):
            raise CheckpointError(
                f"Checkpoint {self.path} has {len(self.leaves)} arrays, but this agent has {len(expected)}. It was "
                "written by another agent or network. Use the run's own config.json."
            )
        for (path, want), got in zip(expected, self.leaves, strict=True):
            if np.shape(want) != got.shape:
                raise CheckpointError(
                    f"Checkpoint {self.path}: {jax.tree_util.keystr(path)} has shape {got.shape}, but this agent has "
                    f"{np.shape(want)}. Use the run's own config.json."
                )
        return jax.tree.unflatten(jax.tree.structure(template), self.leaves)


class Checkpointer:
    """Saves and restores the checkpoints of one learner.

    Args:
        directory: directory of the checkpoints, created at the first save.
        keep: number of latest checkpoints to keep.

    Attributes:
        directory: directory of the checkpoints.
        replays: the saved replay buffers. A replay and its checkpoint have the same number.
    """

    def __init__(self, directory: str | os.PathLike, keep: int = 3) -> None:
        self.directory = pathlib.Path(directory).absolute()
        self.replays = ReplayFiles(self.directory / "replay", keep)
        self._keep = keep
        self._open_manager: Any = None
        self._closing = contextlib.ExitStack()  # closes the manager, then the descriptor of its directory

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first."""
        if not self.directory.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.directory.iterdir() if entry.name.isdigit())

    def save(self, step: int, tree: Tree, extras: Any = None, replay_buffer: Any = None) -> None:
        """Write one checkpoint. Earlier checkpoints are not changed until the new one is complete.

        Args:
            step: number of the checkpoint. If the newest checkpoint has this number or a higher one, the next higher
                number is used, because a saved checkpoint is never overwritten.
            tree: a pytree of arrays to save.
            extras: any picklable object to save, for example counters or the state of the actor.
            replay_buffer: replay buffer to save with the checkpoint, or None.

        Raises:
            CheckpointError: the checkpoint could not be written (disk full, no permission).
        """
        before = max(self.steps(), default=-1)
        step = max(step, before + 1)
        self._remove_unfinished()  # remove files of a save that failed or was interrupted
        self.replays.drop_after(before)
        if replay_buffer is not None:
            self.replays.save(replay_buffer, step)
        leaves = {f"{i:05d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
        pickled = np.frombuffer(pickle.dumps(extras, protocol=4), np.uint8)
        # Save checksums, because Orbax does not verify the content of arrays.
        sums = np.array([_checksum(array) for array in (*leaves.values(), pickled)], np.uint32)
        with self._explain("write", step):
            import orbax.checkpoint as ocp

            args = ocp.args.StandardSave({"leaves": leaves, "extras": pickled, "checksums": sums})
            self._manager().save(step, args=args, force=True)
            self._manager().wait_until_finished()
        self.replays.prune()

    def restore(self, template: Tree, step: int | None = None, replay_buffer: Any = None) -> tuple[Tree, Any, bool]:
        """Read the checkpoint of `step` (by default the latest).

        Args:
            template: a tree with the structure and shapes of the saved tree.
            step: step of the checkpoint.
            replay_buffer: buffer to fill with the newest replay up to this step, or None.

        Returns:
            (tree of numpy arrays with the structure of `template`, extras, has_replay). `has_replay` is True if the
            buffer now contains the replay that was saved with exactly this checkpoint.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or it belongs to another agent or network.
        """
        step = self.existing(step)
        saved = self._read(step)
        tree = saved.tree(template)
        has_replay = replay_buffer is not None and self.replays.restore(replay_buffer, step) == step
        return tree, saved.extras, has_replay

    def read(self, step: int | None = None) -> SavedCheckpoint:
        """Read the checkpoint of `step` (by default the latest) without its replay. Check that it is undamaged.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged.
        """
        return self._read(self.existing(step))

    def check_and_go_back_to(self, step: int | None, aside: pathlib.Path) -> None:
        """Check a checkpoint before a run resumes from it, and move all newer checkpoints and replays elsewhere.

        The file `versions.json` is not moved, so that the versions of the parameters never decrease.

        Args:
            step: step of the checkpoint. None means the newest checkpoint, if there is one; then nothing is moved.
            aside: newer checkpoints are moved to a new directory under this path.

        Raises:
            UsageError: the checkpoint is damaged, or there is no checkpoint of this step.
        """
        steps = self.steps()
        if not steps and step is None:
            return
        chosen = self.existing(step, UsageError)
        try:
            self._read(chosen)
        except CheckpointError as error:
            raise UsageError(f"{error} {self._newest_good([one for one in steps if one != chosen])}") from error
        # Move all checkpoints (the newest first), then the replays.
        # A checkpoint that remains after an interrupted move then still has its replay.
        newer = [self.directory / str(one) for one in reversed(steps) if one > chosen]
        newer += [copy for copy in BestCheckpoint(self.directory).copies() if int(copy.stem) > chosen]
        if newer:
            newer += [self.replays.path(one) for one in self.replays.numbers() if one > chosen]
            _move(newer, self.directory.parent, aside / time.strftime("%Y%m%d-%H%M%S"))

    def _newest_good(self, steps: list[int]) -> str:
        for step in reversed(steps):
            with contextlib.suppress(CheckpointError):
                self._read(step)
                return f"The newest good checkpoint is {step}. Use --resume --resume-from {step} to continue from it."
        return "No other checkpoint is good. Start a new run with --config RUN_DIR/config.json."

    def existing(self, step: int | None, error: type[RlframeError] = CheckpointError) -> int:
        """Return `step`, or the latest step if `step` is None. Raise `error` if there is no such checkpoint."""
        steps = self.steps()
        if step is not None and step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise error(f"There is no checkpoint {step} in {self.directory}; there are {there}.")
        if not steps:
            raise error(f"There is no checkpoint in {self.directory}. Start the run without resuming.")
        return steps[-1] if step is None else step

    def _read(self, step: int) -> SavedCheckpoint:
        with self._explain("read", step):
            import orbax.checkpoint as ocp

            saved = self._manager().restore(step, args=ocp.args.StandardRestore())
            leaves = [np.asarray(saved["leaves"][name]) for name in sorted(saved["leaves"])]
            pickled = np.asarray(saved["extras"])
            if [_checksum(array) for array in (*leaves, pickled)] != np.asarray(saved["checksums"]).tolist():
                raise ValueError("the checksums of its arrays do not match")
            return SavedCheckpoint(self.directory / str(step), leaves, pickle.loads(pickled.tobytes()))

    def close(self) -> None:
        """Stop Orbax's threads. A later call starts them again."""
        self._open_manager = None
        with root_handler(logging.lastResort or logging.NullHandler()):
            self._closing.close()

    def _manager(self) -> Any:
        if self._open_manager is None:
            import orbax.checkpoint as ocp

            logging.getLogger("absl").addFilter(_is_useful)  # a logger has each filter only once
            self.directory.mkdir(parents=True, exist_ok=True)
            options = ocp.CheckpointManagerOptions(max_to_keep=self._keep, enable_async_checkpointing=False)
            native = self._closing.enter_context(contextlib.closing(NativePath(self.directory)))
            manager = ocp.CheckpointManager(native.path, options=options)
            self._open_manager = self._closing.enter_context(contextlib.closing(manager))
        return self._open_manager

    def _remove_unfinished(self) -> None:
        for unfinished in self.directory.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    @contextlib.contextmanager
    def _explain(self, action: str, step: int) -> Iterator[None]:
        try:
            with root_handler(logging.lastResort or logging.NullHandler()):
                yield
        except Exception as error:
            path = self.directory / str(step)
            if action == "write":
                self._remove_unfinished()
                # after an error, the manager may be unusable, so the next attempt creates a new one
                with contextlib.suppress(Exception):
                    self.close()
            others = [self.directory / str(other) for other in self.steps() if other != step]
            kept = f" The last good checkpoint is {others[-1]}." if others else ""
            if action == "read":
                raise CheckpointError(f"Checkpoint {path} is damaged: {_first_line(error)}.") from error
            free = _free_megabytes(self.directory)
            hint = f" Only {free:.1f} MB are free on this disk. Free some space." if free < 1_000 else ""
            raise CheckpointError(f"Cannot write checkpoint {path}: {_first_line(error)}.{kept}{hint}") from error


def last_good(checkpointer: Checkpointer | None) -> str:
    """Return a sentence for error messages: it contains the path of the newest checkpoint."""
    steps = checkpointer.steps() if checkpointer is not None else []
    if checkpointer is None or not steps:
        return "Nothing was saved before."
    return f"The last good checkpoint is {checkpointer.directory / str(steps[-1])}."


def _move(paths: list[pathlib.Path], source: pathlib.Path, destination: pathlib.Path) -> None:
    """Move `paths`, which are under `source`, to the same relative paths under `destination`."""
    for path in paths:
        target = destination / path.relative_to(source)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        except OSError as error:
            raise UsageError(f"Cannot move {path} to {target}: {error.strerror}.") from error
    _log.warning("All checkpoints and replays newer than the chosen checkpoint were moved to %s.", destination)


def _is_useful(record: logging.LogRecord) -> bool:
    """Return False for Orbax's warning about a restore without a template. `SavedCheckpoint.tree` has the template."""
    return "expects a target tree" not in record.getMessage()


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).tobytes())


def _first_line(error: Exception) -> str:
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:160].rstrip(".")


def _free_megabytes(directory: pathlib.Path) -> float:
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free / 1e6
