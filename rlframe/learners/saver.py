"""The checkpoints of `Learner.run()`, and what goes with them: the replay, where nobody else keeps it."""

from __future__ import annotations

import logging
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

from rlframe.errors import CheckpointError
from rlframe.interprocess.progress import SAVING
from rlframe.learners.config import LearnerConfig
from rlframe.learners.replay_files import ReplayFiles
from rlframe.replay import BaseReplayBuffer

_log = logging.getLogger(__name__)

_SHARE = 0.05  # of the time may go into writing a large replay
_AT_END_BYTES = 2**30  # a larger replay is not written at the end: a program that stops has only seconds


class Saver:
    """Writes a learner's checkpoints. Any thread may call it.

    A replay is complete before the checkpoint that names it is written: whatever is cut off, the newest checkpoint is
    good.

    Args:
        cfg: of the learner; replays go into `replay` below its `checkpoint_dir`.
        learner: what is saved.
        lock: held by it while it updates.
        replay_buffer: what it samples.
        may_write: called before anything is written: what it raises, `save` raises, and nothing is written.
    """

    def __init__(
        self,
        cfg: LearnerConfig,
        learner: Any,
        lock: Any,
        replay_buffer: Any,
        may_write: Callable[[], None] | None = None,
    ) -> None:
        assert cfg.checkpoint_dir is not None
        self._cfg, self._may_write = cfg, may_write or (lambda: None)
        self._learner, self._lock, self._replay_buffer = learner, lock, replay_buffer
        self._carries_replay = isinstance(replay_buffer, BaseReplayBuffer) and replay_buffer.is_saved_by_learner
        self._files = ReplayFiles(pathlib.Path(cfg.checkpoint_dir) / "replay", cfg.checkpoints_kept)
        self._large_due = self._tried_at = time.monotonic()
        self._saved_step: int | None = None  # nothing is saved yet
        self._starting = threading.Lock()
        self._thread = threading.Thread()  # of `save_soon`; this one never ran
        self._failure: Exception | None = None

    def save_if_due(self, *, now: bool = False, final: bool = False) -> None:
        """Writes a checkpoint with its replay between two updates, where one is due.

        Args:
            now: one is due.
            final: nothing is published after this; see `Learner.save`.

        Raises:
            CheckpointError: the final one could not be written; the ones before are untouched.
            NonFiniteLossError: the parameters hold NaN or infinity; nothing was written.
        """
        self._wait()
        cfg, seconds = self._cfg, time.monotonic() - self._tried_at
        is_due = self._learner.learner_steps % cfg.checkpoint_every == 0 or seconds >= cfg.checkpoint_seconds
        if is_due or now or final:
            self._save_or_warn(final)

    def _save_or_warn(self, final: bool) -> None:
        """Writes a checkpoint, unless there is one of this learner step already.

        One that cannot be written (the disk is full, say) is warned of, and tried again when the next is due: the ones
        before are untouched.

        Raises:
            CheckpointError: the final one could not be written.
        """
        try:
            self._save(final)
        except CheckpointError as error:
            if final:
                raise
            _log.warning("%s Learning goes on; the next checkpoint is another try.", error)
        finally:
            self._tried_at = time.monotonic()

    def _save(self, final: bool) -> None:
        with self._lock, SAVING:
            self._may_write()
            steps = self._learner.learner_steps
            is_new, with_replay = steps != self._saved_step, self._is_replay_due(final)
            # At the end the learner comes first: the program may be killed while a large replay is written.
            if is_new and not (with_replay and (self._files.is_small(self._replay_buffer) or not final)):
                self._save_learner(final)
            if with_replay:
                began = time.monotonic()
                self._files.save(self._replay_buffer, steps)
                self._large_due = time.monotonic() + (time.monotonic() - began) / _SHARE
                self._save_learner(final)
            if final and not (is_new or with_replay):  # it was saved a moment ago, as one that others follow
                self._learner.release_versions()
            self._files.prune()

    def save_soon(self) -> None:
        """Has a thread save, between two updates, and returns at once; `save_if_due` raises what it raises."""
        with self._starting:
            if not self._thread.is_alive():
                self._thread = threading.Thread(target=self._save_in_thread, name="rlframe checkpoint", daemon=True)
                self._thread.start()

    def _wait(self) -> None:
        """Waits for the end of what `save_soon` began. (A lock alone could be taken again and again by the updates.)"""
        if self._thread.is_alive():
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _save_in_thread(self) -> None:
        try:
            self._save_or_warn(final=False)
        except Exception as error:
            self._failure = error
            self._learner.stop()  # it may be waiting for a batch

    def restore(self) -> None:
        """Takes over the latest checkpoint, and the replay that it names."""
        extras = self._learner.restore() or {}
        path = self._files.find(extras.get("replay"))
        if path is not None and self._carries_replay:
            self._replay_buffer.restore(path)
        self._files.drop_after(self._learner.learner_steps)
        self._saved_step = self._learner.learner_steps

    def _save_learner(self, final: bool) -> None:
        self._learner.save({"replay": self._files.newest()}, final=final)
        self._saved_step = self._learner.learner_steps

    def _is_replay_due(self, final: bool) -> bool:
        if not self._carries_replay or self._files.newest() == self._learner.learner_steps:
            return False
        stats = self._replay_buffer.stats()
        may_be_large = time.monotonic() >= self._large_due or (final and stats["bytes"] <= _AT_END_BYTES)
        return stats["steps"] > 0 and (may_be_large or self._files.is_small(self._replay_buffer))
