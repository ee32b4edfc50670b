"""The worker that learns, and the record of its updates for the coordinator."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from rlframe import handles
from rlframe.coordinator.messages import (
    CallRefused,
    Demand,
    Failed,
    Header,
    Learn,
    Learned,
    NotReady,
    Started,
    StartTask,
    Update,
)
from rlframe.coordinator.param_store import Attempt, ParamStore
from rlframe.coordinator.workers.overrides import replaced, with_config
from rlframe.coordinator.workers.task_worker import TaskWorker
from rlframe.learners import Checkpointer, Learner, LearnerConfig
from rlframe.learners.learner_replay import LearnerReplay
from rlframe.replay import as_replay_buffer
from rlframe.types import Batch

_PUBLISH_EVERY = 0.005  # minimum seconds between two published versions
# Fields of LearnerConfig that a task may override. The other fields belong to the run or to `Learner.run()`.
_OVERRIDES = ("seed", "max_learner_steps", "checkpoint_every", "checkpoint_seconds", "checkpoints_kept")


class LearnerWorker(TaskWorker):
    """A worker with a `Learner` that learns when the coordinator calls it, and publishes to the param store.

    A call contains the keys of the batches, or grants a number of batches to draw. Checkpoints are saved and restored
    as in `Learner.run()`: a task starts from the latest checkpoint if `cfg.resume` is set.

    The start of a task fences off the learners of earlier attempts. They can no longer write parameters or checkpoints.
    A worker that is fenced off replies with Failed (`FencedError`), and is idle.

    The overrides of a task have two sections: `policy` changes the agent's config (the learning rate, for example), and
    `learner` changes the LearnerConfig. The values in `policy` are the policy's hyperparameters. The learner puts them
    into the param store with the parameters, and collectors apply them.

    Args:
        cfg: The Learner's configuration.
        agent: The `Agent` that learns.
        replay_buffer: A buffer that this process can sample or fetch from by key, or a `reverb.Client`.
        param_store: A `ParamStore`, or a handle to one.
        worker_id, index, incarnation: See `TaskWorker`.
        batches: Maximum number of batches in one grant. If the staleness is bounded, the worker requests no more
            batches than it can use before the next version.
    """

    kind = "learn"

    def __init__(
        self,
        cfg: LearnerConfig,
        agent: Any,
        replay_buffer: Any,
        param_store: ParamStore | Any,
        worker_id: str,
        index: int,
        incarnation: int,
        *,
        batches: int = 32,
    ) -> None:
        self._base_cfg, self._agent = cfg, agent
        self._store = handles.resolve(param_store, "param store")
        self._replay_source = replay_buffer
        self._batches = batches
        self._cfg = cfg  # configuration of the task
        self._learner: Learner | None = None
        self._buffer: Any = None
        super().__init__(worker_id, index, incarnation)

    def data_demand(self, header: Header) -> Demand | NotReady | CallRefused | Failed:
        """Return the number of batches that the learner can accept now."""
        return self._call(header, "data_demand", self._data_demand)

    def learn(self, header: Header, request: Learn) -> Learned | NotReady | CallRefused | Failed:
        """Learn from batches, and publish the new version."""
        return self._call(header, "learn", lambda: self._learn(request))

    def _start_task(self, task: StartTask) -> Started:
        self._policy_id, self._policy = task.policy_id, task.overrides.get("policy", {})
        agent = with_config(self._agent, self._policy)
        self._cfg = replaced(self._base_cfg, "learner", task.overrides.get("learner", {}), _OVERRIDES)
        assert self._task is not None
        self._fence = fence = Attempt(task.options.get("epoch", 0), self._task.attempt)
        # Fence off earlier learners before anything is read. After this, they can write no checkpoint or version.
        self._store.open_policy(task.policy_id, fence)
        self._buffer = as_replay_buffer(self._replay_source, lambda: self._agent)
        self._max_staleness = self._buffer.spec.max_staleness
        self._replay = RecordingReplay(self._buffer, agent)
        check_may_write = functools.partial(self._store.check_not_fenced, task.policy_id, fence)
        known = max(self._store.newest_version(task.policy_id), task.options.get("min_version", -1))
        self._learner = learner = Learner(
            self._cfg, agent, self._replay, check_may_write=check_may_write, above_version=known
        )
        self._replay.drop_too_old(learner.params_version)
        self._published, self._published_at = -1, 0.0
        self._publish(learner)
        steps, version = learner.learner_steps, learner.params_version
        return Started({"learner_steps": steps, "params_version": version, "resumed": learner.restored is not None})

    def _data_demand(self) -> Demand:
        learner = self._learner
        assert learner is not None
        batches = self._batches if self._max_staleness is None else min(self._batches, 1 + self._max_staleness)
        if self._cfg.max_learner_steps is not None:
            batches = min(batches, max(0, self._cfg.max_learner_steps - learner.learner_steps))
        return Demand(batches)

    def _learn(self, request: Learn) -> Learned | NotReady:
        learner = self._learner
        assert learner is not None
        dropped = 0
        for batch in self._batches_of(request):
            dropped += 1 if batch is None else self._update(learner, batch)
        logs = learner.wait_for_update()
        if request.save and learner.saver is not None:
            learner.saver.save_if_due(now=True)
        updates = self._replay.take_updates()
        if not updates and self._store.newest_version(self._policy_id) < self._published:
            self._published = -1  # publish again, because the store was restarted and lost this version
        self._publish(learner)
        if request.count and not updates and not dropped:
            return NotReady("data")
        return Learned(learner.params_version, learner.learner_steps, updates, dropped, logs)

    def _batches_of(self, request: Learn) -> Iterator[Batch | None]:
        """Yield the batches of a request. Yield None in place of a batch that is no longer in the buffer."""
        if request.batches is None:
            until = time.monotonic() + request.seconds
            for _ in range(request.count):
                batch = self._draw(until)
                if batch is None:
                    break
                yield batch
        else:  # no time limit, because these batches are not drawn again
            for meta in request.batches:
                yield None if self._stop.is_set() else self._buffer.fetch(meta.keys, meta.probabilities)

    def _update(self, learner: Learner, batch: Batch) -> bool:
        """Learn from one batch. Return True if the batch was dropped because it was too old."""
        if learner.step(batch) is None:
            return True
        # If the staleness is bounded, the collectors wait for this version.
        if self._max_staleness is not None or time.monotonic() > self._published_at + _PUBLISH_EVERY:
            self._publish(learner)
        if learner.saver is not None:
            learner.saver.save_if_due()
        return False

    def _draw(self, until: float) -> Batch | None:
        """Return the next batch. Return None if no batch arrives before the time `until`, or if the task ends."""
        while not self._stop.is_set() and (left := until - time.monotonic()) > 0:
            batch = self._buffer.wait_for_batch(min(left, 0.1))
            if batch is not None:
                return batch
        return None

    def _publish(self, learner: Learner) -> None:
        """Put the newest version into the store. Raise instead if the loss of the last update is not finite."""
        learner.wait_for_update()
        version, packed = learner.get_packed(self._published)
        if packed is not None:
            hparams = {"learner_steps": learner.learner_steps, "policy": self._policy}
            self._store.put(self._policy_id, version, packed, hparams, attempt=self._fence)
            self._published, self._published_at = version, time.monotonic()

    def _progress_count(self) -> int:
        learner = self._learner
        return learner.learner_steps if learner is not None else 0

    def _close_task(self, final: bool) -> dict[str, Any]:
        learner, buffer = self._learner, self._buffer
        self._learner = self._buffer = None
        try:
            if learner is None:
                return {}
            if final:
                if learner.saver is not None:
                    learner.saver.save_if_due(final=True)
                self._publish(learner)
            steps, version, saved = learner.learner_steps, learner.params_version, self._checkpoints()
            return {"learner_steps": steps, "params_version": version, "checkpoint": saved[-1] if saved else None}
        finally:
            if learner is not None:
                learner.close()
            if buffer is not None and buffer is not self._replay_source:
                buffer.close()

    def _checkpoints(self) -> list[str]:
        if self._cfg.checkpoint_dir is None:
            return []
        checkpointer = Checkpointer(self._cfg.checkpoint_dir)
        return [str(checkpointer.directory / str(step)) for step in checkpointer.steps()]


class RecordingReplay(LearnerReplay):
    """A learner's replay buffer. It records the keys and priorities of each update for the coordinator.

    Args:
        replay_buffer: The buffer that stores the data. If it returns batches by key, the coordinator samples from it.
        agent: See `LearnerReplay`.
    """

    def __init__(self, replay_buffer: Any, agent: Any) -> None:
        learner_samples = not getattr(replay_buffer, "fetches_by_key", False)
        super().__init__(replay_buffer, agent, threading.Event(), learner_samples=learner_samples)
        self._updates: list[Update] = []

    def take_updates(self) -> tuple[Update, ...]:
        """Return the updates since the last call."""
        updates, self._updates = self._updates, []
        return tuple(updates)

    def note_update(self, keys: Any, version: int) -> None:
        if len(keys):
            self._updates.append(Update(np.asarray(keys)))
        super().note_update(keys, version)

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        self._updates[-1] = Update(np.asarray(keys), np.asarray(priorities))  # the last update
        super().update_priorities(keys, priorities)
