"""When the checkpoints of `Learner.run()` are written, and when the replay goes with them.

- `Learner.run()` calls `Saver.save_if_due` after each update. `save_soon` saves from another thread, between updates.
- `Saver` decides: by `checkpoint_every` and `checkpoint_seconds`, and for the replay by `ReplayFiles.is_due`.
- `Learner.save` collects the arrays, and `Checkpointer.save` (`checkpoints.py`) writes them.
- In a run of one process, the training loop (`rlframe/programs/training/loop.py`) decides, in environment steps.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from rlframe.errors import CheckpointError
from rlframe.interprocess.phases import SAVING
from rlframe.learners.config import LearnerConfig
from rlframe.replay.replay_files import ReplayFiles

_log = logging.getLogger(__name__)


class Saver:
    """Saves a learner when a checkpoint is due. Any thread may call it.

    Args:
        cfg: of the learner.
        learner: saves itself, by `Learner.save`.
        lock: held by it while it updates.
        replay_buffer: saved with it; None: none is.
        replays: the files of the replay.
    """

    def __init__(self, cfg: LearnerConfig, learner: Any, lock: Any, replay_buffer: Any, replays: ReplayFiles) -> None:
        self._cfg, self._learner, self._lock = cfg, learner, lock
        self._replay_buffer, self._replays = replay_buffer, replays
        self._tried_at = time.monotonic()
        self._starting = threading.Lock()
        self._thread = threading.Thread()  # of `save_soon`; this one never ran
        self._failure: Exception | None = None

    def save_if_due(self, *, now: bool = False, final: bool = False) -> None:
        """Write a checkpoint with its replay between two updates, if one is due.

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
        """Write a checkpoint, unless there is one of this learner step already.

        If it cannot be written (the disk is full, say), warn, and try again when the next is due: the ones before are
        untouched.

        Raises:
            CheckpointError: the final one could not be written.
        """
        try:
            with self._lock, SAVING:
                self._save(final)
        except CheckpointError as error:
            if final:
                raise
            _log.warning("%s Learning goes on; the next checkpoint is another try.", error)
        finally:
            self._tried_at = time.monotonic()

    def _save(self, final: bool) -> None:
        learner, buffer, steps = self._learner, self._replay_buffer, self._learner.learner_steps
        is_new, with_replay = learner.saved_step != steps, False
        if buffer is not None and learner.replay_saved_step != steps:
            with_replay = self._replays.is_due(buffer, final)
        if final and is_new and with_replay and not self._replays.is_small(buffer):
            learner.save(final=True)  # first: the program may be killed while a large replay is written
        if is_new or with_replay:
            learner.save(final=final, with_replay=with_replay)
        elif final:  # it was saved a moment ago, as one that others follow
            learner.release_versions()

    def save_soon(self) -> None:
        """Start a thread that saves between two updates. `save_if_due` raises its errors."""
        with self._starting:
            if not self._thread.is_alive():
                self._thread = threading.Thread(target=self._save_in_thread, name="rlframe checkpoint", daemon=True)
                self._thread.start()

    def _wait(self) -> None:
        """Wait for the end of what `save_soon` began. (A lock alone could be taken again and again by the updates.)"""
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
