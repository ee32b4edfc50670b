"""When checkpoints are written (`Saver`), and which one is the best (`BestCheckpoint`)."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from rlframe.errors import CheckpointError
from rlframe.interprocess.files import write_atomically
from rlframe.interprocess.heartbeat import SAVING
from rlframe.learners.config import LearnerConfig
from rlframe.replay.replay_files import ReplayFiles

_log = logging.getLogger(__name__)


class Best(NamedTuple):
    """The best checkpoint so far."""

    step: int  # number of the checkpoint
    return_mean: float  # mean return of its evaluation


class BestCheckpoint:
    """Keeps the checkpoint whose evaluation had the highest mean return. Of equal returns, the newest one counts.

    It is a copy in `CHECKPOINTS/best/STEP`, because old checkpoints are deleted. The copy consists of hard links, so it
    takes no space while the original exists. `CHECKPOINTS/best/best.json` names the best one, and is written atomically
    after the copy is complete. A process that is killed therefore leaves the earlier best checkpoint.

    Args:
        checkpoints: directory of the checkpoints.

    Attributes:
        checkpoints: see Args.
        directory: directory of the copies, with the same layout as `checkpoints`.
    """

    def __init__(self, checkpoints: str | os.PathLike[str]) -> None:
        self.checkpoints = pathlib.Path(checkpoints).absolute()
        self.directory = self.checkpoints / "best"
        self._record = self.directory / "best.json"

    def read(self) -> Best | None:
        """Return the best checkpoint, or None if there is none."""
        try:
            best = Best(**json.loads(self._record.read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return best if (self.directory / str(best.step)).is_dir() else None

    def copies(self) -> list[pathlib.Path]:
        """Return the directories of all copies: the best one, and perhaps one whose evaluation has not ended."""
        return [path for path in self.directory.glob("*") if path.is_dir()]

    def keep(self, step: int) -> None:
        """Copy a checkpoint before its evaluation, so that it exists at the end. Log a warning if that fails."""
        with _warn_if_it_fails(step):
            self._copy(step)

    def offer(self, step: int, return_mean: float) -> None:
        """Make a checkpoint the best one, unless the best one has a higher return. Remove all other copies."""
        best = self.read()
        if math.isfinite(return_mean) and (best is None or return_mean >= best.return_mean):
            with _warn_if_it_fails(step):
                self._copy(step)
                write_atomically(self._record, json.dumps(Best(step, return_mean)._asdict()), "\n")
        best = self.read()
        for path in self.copies():
            if best is None or path.name != str(best.step):
                shutil.rmtree(path, ignore_errors=True)

    def _copy(self, step: int) -> None:
        target, temporary = self.directory / str(step), self.directory / f"{step}.tmp"
        if not target.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
            shutil.copytree(self.checkpoints / str(step), temporary, copy_function=_link)
            temporary.rename(target)


@contextlib.contextmanager
def _warn_if_it_fails(step: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _log.warning("Checkpoint %d cannot be kept as the best one: %s", step, error)


def _link(source: str, target: str) -> None:
    """Make a hard link. Copy the file instead if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


class Saveable(Protocol):
    """The part of a learner that a `Saver` uses. See `Learner`."""

    learner_steps: int
    saved_step: int
    replay_saved_step: int

    def save(self, *, final: bool = False, with_replay: bool = False) -> None: ...

    def release_versions(self) -> None: ...

    def stop(self) -> None: ...


class Saver:
    """Saves a learner when a checkpoint is due. Any thread may call it.

    Args:
        cfg: config of the learner.
        learner: the learner.
        lock: lock that the learner holds during an update.
        replay_buffer: buffer to save with the learner, or None.
        replays: files of the saved replay buffers.
    """

    def __init__(
        self, cfg: LearnerConfig, learner: Saveable, lock: Any, replay_buffer: Any, replays: ReplayFiles
    ) -> None:
        self._cfg, self._learner, self._lock = cfg, learner, lock
        self._replay_buffer, self._replays = replay_buffer, replays
        self._tried_at = time.monotonic()
        self._starting = threading.Lock()
        self._thread = threading.Thread()  # thread of `save_soon`; this placeholder never runs
        self._failure: Exception | None = None

    def save_if_due(self, *, now: bool = False, final: bool = False) -> None:
        """If a checkpoint is due, write it between two updates. Write the replay too if it is due.

        Args:
            now: save even if no checkpoint is due.
            final: True if no parameters are published after this save (see `Learner.save`).

        Raises:
            CheckpointError: the final checkpoint could not be written. Earlier checkpoints are not touched.
            NonFiniteLossError: the parameters contain NaN or infinity. Nothing was written.
        """
        self._wait()
        cfg, seconds = self._cfg, time.monotonic() - self._tried_at
        is_due = self._learner.learner_steps % cfg.checkpoint_every == 0 or seconds >= cfg.checkpoint_seconds
        if is_due or now or final:
            self._save_or_warn(final)

    def _save_or_warn(self, final: bool) -> None:
        """Write a checkpoint, unless this learner step already has one.

        If the checkpoint cannot be written (for example because the disk is full), log a warning and try again when the
        next checkpoint is due.

        Raises:
            CheckpointError: the final checkpoint could not be written.
        """
        try:
            with self._lock, SAVING:
                self._save(final)
        except CheckpointError as error:
            if final:
                raise
            _log.warning("%s Learning continues. The next checkpoint will be tried when it is due.", error)
        finally:
            self._tried_at = time.monotonic()

    def _save(self, final: bool) -> None:
        learner, buffer, steps = self._learner, self._replay_buffer, self._learner.learner_steps
        is_new, with_replay = learner.saved_step != steps, False
        if buffer is not None and learner.replay_saved_step != steps:
            with_replay = self._replays.is_due(buffer, final)
        if final and is_new and with_replay and not self._replays.is_small(buffer):
            # Save without the replay first, because the program may be killed while the large replay is written.
            learner.save(final=True)
        if is_new or with_replay:
            learner.save(final=final, with_replay=with_replay)
        elif final:  # this step is already saved, but not as the final checkpoint
            learner.release_versions()

    def save_soon(self) -> None:
        """Start a thread that saves between two updates. If it fails, the next `save_if_due` raises the error."""
        with self._starting:
            if not self._thread.is_alive():
                self._thread = threading.Thread(target=self._save_in_thread, name="rlframe checkpoint", daemon=True)
                self._thread.start()

    def _wait(self) -> None:
        """Wait until the thread of `save_soon` has ended, and raise its error.

        Without this wait, the learner could take the lock for one update after another, and the thread would never
        get it.
        """
        if self._thread.is_alive():
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _save_in_thread(self) -> None:
        try:
            self._save_or_warn(final=False)
        except Exception as error:
            self._failure = error
            self._learner.stop()  # end the learner's wait for a batch
