"""The Learner: parameters and learner state, one jitted update, versions, checkpoints."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from rlframe import handles
from rlframe.agents.base import Agent
from rlframe.errors import StoppedError, UsageError
from rlframe.interprocess.heartbeat import COMPUTING
from rlframe.interprocess.memory import keep_freed_memory, use_one_arena
from rlframe.learners.checkpoints import Checkpointer, RestoredCheckpoint, last_good
from rlframe.learners.config import DataConfig, LearnerConfig
from rlframe.learners.learner_replay import LearnerReplay
from rlframe.learners.saving import Saver
from rlframe.learners.update import (
    InitialState,
    LearnerUpdate,
    UncheckedUpdate,
    as_numbers,
    check_is_batch,
    check_params,
    check_update,
    mean_version,
)
from rlframe.learners.versions import VersionCounter
from rlframe.params.packing import PackedParams
from rlframe.params.publication import Publication, PublicationReader
from rlframe.replay import ReplayReader
from rlframe.replay.layout import batch_shapes
from rlframe.sharding import LearnerDevices, copy_arrays
from rlframe.types import Batch, Logs, Tree


class Learner:
    """Trains an agent's parameters from batches, and publishes them with increasing versions.

    `get_params` returns a copy, so that each update can donate the Learner's own arrays.

    Each update is checked for NaN and infinity. The check waits for the device, so it runs late: when the next update
    starts, or in `wait_for_update` and `save`. Errors and the logs in `stats` are therefore one update late. Actors
    never get parameters that are not finite: the jitted update replaces them with the previous parameters. An update
    that logs priorities or learns from trajectories is checked immediately.

    Args:
        cfg: see `LearnerConfig`.
        agent: the `Agent` to train.
        replay_buffer: a `ReplayReader` in this process, a `LearnerReplay` or a `reverb.Client`. `run()` takes batches
            from this buffer. `step` passes priorities to it.
        logger: any object with `write(step, values)`, used by `run()`. None writes no logs.
        check_may_write: called before anything is written to `cfg.checkpoint_dir`. If it raises, nothing is written.
            It must raise if a newer learner has replaced this one. None always allows writing.
        above_version: the first published version is higher than this number. Set it if this learner replaces a
            learner that published versions but left no checkpoint.

    Attributes:
        learner_steps: updates since the run started, including those before a resume.
        saver: writes due checkpoints. None without a `checkpoint_dir`. Callers that use `step` can call it, too.
        saved_step: the value of `learner_steps` in the newest checkpoint.
        devices: the devices that share each update.
        replay_saved_step: the value of `learner_steps` in the newest checkpoint that has a replay.
        restored: the checkpoint that the Learner was restored from, or None.
    """

    def __init__(
        self,
        cfg: LearnerConfig,
        agent: Agent,
        replay_buffer: ReplayReader | Any,
        logger: Any = None,
        *,
        check_may_write: Callable[[], None] | None = None,
        above_version: int = -1,
    ) -> None:
        use_one_arena()  # must be called before JAX is used; engines call it when a process starts
        keep_freed_memory()
        self._cfg, self._agent, self._logger = cfg, agent, logger
        self._stop, self._finish, self._finished = threading.Event(), threading.Event(), threading.Event()
        self._update_lock, self.devices = threading.RLock(), LearnerDevices(cfg.devices, shard_params=cfg.shard_params)
        self.learner_steps = 0
        self._logs: Logs = {}  # logs of the newest checked update
        self._unchecked: UncheckedUpdate | None = None  # the newest update, until `_check_update` has checked it
        self._replay = LearnerReplay.of(replay_buffer, agent, self._stop)
        self._open_checkpoints(check_may_write)
        self._publish_initial_params()
        if cfg.resume:
            self._restore_if_saved()
        if above_version >= self.params_version:
            self._versions.skip(above_version)
            self._publish()
        self._replay.note_update((), self.params_version)

    # --- methods that the constructor calls, in this order

    def _open_checkpoints(self, check_may_write: Callable[[], None] | None) -> None:
        cfg = self._cfg
        self._checkpointer = Checkpointer(cfg.checkpoint_dir, cfg.checkpoints_kept) if cfg.checkpoint_dir else None
        self._last_good = functools.partial(last_good, self._checkpointer)
        self._check_may_write = check_may_write or (lambda: None)
        self._versions = VersionCounter(cfg.checkpoint_dir, check_may_write)
        self.saved_step = self.replay_saved_step = -1
        self.restored: RestoredCheckpoint | None = None
        self.saver: Saver | None = None
        if self._checkpointer is not None:
            self.saver = Saver(cfg, self, self._update_lock, self._replay.saved, self._checkpointer.replays)

    def _publish_initial_params(self) -> None:
        cfg, agent, initial = self._cfg, self._agent, InitialState(self._agent)
        num_envs = cfg.num_envs if self._replay.buffer is not None else None
        arrays = initial.make(cfg.seed) if num_envs is None else initial.shapes()
        self._update = LearnerUpdate(agent, arrays.packing(agent), self.devices)
        if num_envs is not None:
            self._update.compile_ahead(arrays, batch_shapes(agent, num_envs))
            arrays = initial.make(cfg.seed)
        self._params, self._learner_state, self._actor_arrays = self.devices.put_state(arrays)
        check_params(self._params, self.learner_steps, self._last_good)
        self._publication = Publication(self._versions.value, self._update.for_actors(self._actor_arrays))

    def _restore_if_saved(self) -> None:
        """Restore the latest checkpoint. If there is none, continue above the versions that may have been published."""
        if self._checkpointer is not None and self._checkpointer.steps():
            self.restore(with_replay=True)
        else:  # an earlier learner may have published versions before it died without a checkpoint
            self._versions.resume(self.params_version)
            self._publish()

    # --- updates

    @property
    def params_version(self) -> int:
        """The version that `get_params` returns now."""
        return self._publication.version

    def step(self, batch: Batch | None, *others: Any) -> Logs | None:
        """Do one update from `batch`. If `batch` is None, do nothing and return None.

        Returns:
            The agent's logs, as device scalars that are fetched when read, and `staleness`: the mean number of versions
            between the items and the current parameters. None if the batch was dropped because it is too old (see
            `max_staleness` of the replay).

        Raises:
            NonFiniteLossError: the loss or a parameter was NaN or infinite after the previous update. Actors never get
                such parameters: the version of that update contains the parameters of the version before it.
            UsageError: a log of the agent is not a number, or the argument is not a batch.
        """
        check_is_batch(batch, *others)
        if batch is None or self._replay.is_too_old(batch.params_version, self.params_version):
            return None
        data = self._update.put(batch)  # the devices can get it while they still compute the previous update
        with self._update_lock, COMPUTING:
            return self._step(batch, data)

    def _step(self, batch: Batch, data: Batch) -> Logs:
        self._check_update()
        keys, staleness = batch.keys, self.params_version - mean_version(batch.params_version)
        self._params, self._learner_state, logs, self._actor_arrays, is_finite = self._update(
            self._params, self._learner_state, data, self._actor_arrays
        )
        self.learner_steps += 1
        priorities, logs["staleness"] = logs.pop("priorities", None), float(staleness)
        self._unchecked = UncheckedUpdate(self.learner_steps, logs, keys, is_finite)
        if self._agent.learns_from == "trajectories":  # a long update: an immediate check costs little
            self._check_update()
        version = self._versions.next()
        if self._replay.max_staleness is not None:
            # Wait for the device here: actors that call `get_params` for this version must not wait for it.
            jax.block_until_ready(self._actor_arrays)
        self._replay.drop_too_old(version, after_update=True)
        self._publish()
        self._replay.note_update(keys, version)
        if priorities is not None:
            # The buffer must not receive NaN. This check costs no extra wait, because the next line fetches priorities.
            self._check_update()
            self._replay.update_priorities(keys, np.asarray(priorities))
        return logs

    @property
    def state(self) -> tuple[Tree, Tree]:
        """The parameters and the learner state, on the device."""
        return self._params, self._learner_state

    def adopt(self, params: Tree, learner_state: Tree, logs: Logs, updates: int, failed: int = 0) -> None:
        """Take the new state and logs of `updates` updates made from `state`. The next ones may donate these arrays.

        `failed` is the number of the first of these updates that is not finite, or 0. Raise NonFiniteLossError for it.
        """
        with self._update_lock:
            self._params, self._learner_state = params, learner_state
            if not updates:
                return
            self._logs = logs
            if failed:
                step = self.learner_steps + failed
                check_update(UncheckedUpdate(step, logs, (), is_finite=False), self._last_good)
            self.learner_steps += updates
            self._versions.next(updates)
            self._publish_state()

    def wait_for_update(self) -> dict[str, float]:
        """Wait for the newest update and return its logs as numbers. Return an empty dict before the first update.

        Raises:
            NonFiniteLossError: the loss or a parameter after this update was NaN or infinite.
        """
        with self._update_lock:
            self._check_update()
        return as_numbers(self._logs)

    # --- the loop

    def run(self) -> None:
        """Learn, log and save until `max_learner_steps`, `finish()`, `stop()` or the end of the program."""
        with handles.stop_with_program(self.stop):
            self._learn()
            self._finished.set()
            if self._finish.is_set() or (self._is_done and not self._cfg.ends_program):
                self._stop.wait()  # other nodes may still call `get_params`
        if self._is_done and self._cfg.ends_program:
            handles.stop_program()

    def _learn(self) -> None:
        self._replay.drop_too_old(self.params_version)
        dataset = self._make_dataset(self._cfg.data)
        # `stop` may have been called before the dataset existed. A resumed learner may have no steps left.
        try:
            for batch in () if self._should_end or self._is_done else dataset:
                if self._should_end:
                    break
                self._learn_from(batch)
                if self._is_done:
                    break
        except StoppedError:  # the wait for the replay server raises this error at a stop
            if not (self._stop.is_set() or handles.is_program_stopping()):
                raise
        finally:
            self._replay.close_dataset()
        if self.saver is not None:
            self.saver.save_if_due(final=True)

    def _learn_from(self, batch: Batch) -> None:
        logs = self.step(batch)
        if logs is None:
            return
        if self._logger is not None and self.learner_steps % self._cfg.log_every == 0:
            self._logger.write(self.learner_steps, logs)
        if self.saver is not None:
            self.saver.save_if_due()

    def _make_dataset(self, data_cfg: DataConfig) -> Iterable[Batch]:
        """Return the batches that `run()` learns from. Override this method to change, filter or mix them.

        An override should take its batches from `super()._make_dataset(data_cfg)`. `stop()` closes this dataset, which
        ends the wait for a batch.
        """
        return self._replay.make_dataset(data_cfg)

    @property
    def _should_end(self) -> bool:
        return self._stop.is_set() or self._finish.is_set()

    @property
    def _is_done(self) -> bool:
        return self._cfg.max_learner_steps is not None and self.learner_steps >= self._cfg.max_learner_steps

    # --- calls from other threads and processes; they never wait for an update

    def finish(self) -> None:
        """End learning and save. `get_params` remains available until `stop()`. Any thread may call `finish`."""
        self._finish.set()
        self._replay.close_dataset()

    def stats(self) -> dict[str, Any]:
        """Return counters, the last checked update's logs, the replay's counters, and whether `run` has `finished`."""
        replay = {f"replay_{name}": value for name, value in self._replay.stats().items()}
        counters = {"learner_steps": self.learner_steps, "params_version": self.params_version}
        return {**as_numbers(self._logs), **replay, **counters, "finished": self._finished.is_set()}

    def stop(self) -> None:
        """End `run()` after the current update, or at once if it waits for a batch. Any thread may call `stop`."""
        self._stop.set()
        self._replay.stop()

    def get_params(self, known_version: int = -1) -> tuple[int, Tree | None]:
        """See `ParamSource`. The arrays are read-only."""
        return self._publication.get_params(known_version)

    def wait_for_version(self, known_version: int, timeout: float) -> int:
        """See `ParamSource`."""
        return self._publication.wait_for_version(known_version, timeout)

    def get_packed(self, known_version: int = -1) -> tuple[int, PackedParams | None]:
        """Return the result of `get_params` in packed form, for an Inferencer."""
        return self._publication.get_packed(known_version)

    def publication_reader(self) -> PublicationReader | None:
        """Return a reader that gives another process on this machine the result of `get_packed`.

        Return None if shared memory is not supported, or after `close`.
        """
        return self._publication.reader()

    def save_soon(self) -> None:
        """Start a thread that saves a checkpoint, and the replay if it is due. `run()` raises the thread's error."""
        if self.saver is None:
            raise UsageError("Learner.save_soon needs LearnerConfig.checkpoint_dir.")
        self.saver.save_soon()

    # --- checkpoints

    def save(self, extras: Any = None, *, final: bool = False, with_replay: bool = False) -> None:
        """Write a checkpoint of parameters, learner state and counters, after the current update.

        Args:
            extras: any picklable object to save in the checkpoint. `restore` returns it.
            final: True if no parameters are published after this save. A resumed run then continues with the next
                version.
            with_replay: save the replay buffer too, unless the buffer is stored elsewhere (for example on a server).

        Raises:
            CheckpointError: the checkpoint could not be written. Earlier checkpoints are not touched.
            NonFiniteLossError: the parameters contain NaN or infinity. Nothing was written.
        """
        if self._checkpointer is None:
            raise UsageError("Learner.save needs LearnerConfig.checkpoint_dir.")
        with self._update_lock:
            self._check_update()
            tree = jax.tree.map(np.asarray, (self._params, self._learner_state))
            check_params(tree[0], self.learner_steps, self._last_good)
            counters = {"learner_steps": self.learner_steps, "version": self.params_version}
            self._check_may_write()
            saved = {"counters": counters, "codec": self._cfg.codec, "extras": extras}
            self._checkpointer.save(self.learner_steps, tree, saved, self._replay.saved if with_replay else None)
            self._note_saved(with_replay)
            if final:
                self.release_versions()

    def release_versions(self) -> None:
        """Release reserved versions that were not used, so that a resumed run skips none. Then publish nothing more."""
        with self._update_lock:
            self._versions.release()

    def restore(self, step: int | None = None, *, with_replay: bool = False) -> Any:
        """Restore a checkpoint (by default the latest). Return the extras that were saved with the checkpoint.

        Args:
            step: step of the checkpoint, which is the name of the checkpoint's directory.
            with_replay: restore the replay buffer too.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or it belongs to another agent or network.
        """
        if self._checkpointer is None:
            raise UsageError("Learner.restore needs LearnerConfig.checkpoint_dir.")
        with self._update_lock:
            buffer, template = self._replay.saved if with_replay else None, (self._params, self._learner_state)
            tree, saved, has_replay = self._checkpointer.restore(template, step, buffer)
            self._params, self._learner_state = self.devices.put_state(copy_arrays(tree))
            self.learner_steps, version = saved["counters"]["learner_steps"], saved["counters"]["version"]
            self._unchecked = None
            self._replay.resume(version)
            self._versions.resume(version)
            self._publish_state()
            self._note_saved(has_replay)
            self.restored = RestoredCheckpoint(saved["extras"], has_replay)
        return saved["extras"]

    def _note_saved(self, with_replay: bool) -> None:
        self.saved_step = self.learner_steps
        self.replay_saved_step = self.learner_steps if with_replay else self.replay_saved_step

    def _publish_state(self) -> None:
        """Pack and publish the current parameters. An update needs only `_publish`: it returns packed parameters."""
        check_params(self._params, self.learner_steps, self._last_good)
        self._actor_arrays = self._update.pack(self._params, self._learner_state)
        self._publish()

    def _publish(self) -> None:
        self._publication.publish(self._versions.value, self._update.for_actors(self._actor_arrays))

    def close(self) -> None:
        """Stop `run()`, and the threads that write checkpoints and publish parameters."""
        self.stop()
        if self._checkpointer is not None:
            self._checkpointer.close()
        self._publication.close()

    def _check_update(self) -> None:
        if self._unchecked is not None:
            update, self._unchecked = self._unchecked, None
            check_update(update, self._last_good)
            self._logs = update.logs
