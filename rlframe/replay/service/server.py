"""The node that contains a replay. Steps are sent to the node in stacks, which contain each observation only once."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from rlframe.errors import CheckpointError, StoppedError
from rlframe.interprocess.files import write_atomically
from rlframe.interprocess.heartbeat import SAVING
from rlframe.replay import replay_files
from rlframe.replay.base import override
from rlframe.replay.local import ReplayBuffer
from rlframe.replay.rate_limiter import RateLimiter, default_run_ahead, items_kept
from rlframe.shutdown import stop_with_program
from rlframe.types import AgentSpecs, Batch, Step, TimeStep

_MAX_STEPS, _MAX_BYTES = 256, 8 * 2**20  # limits of a `SendBuffer`

_leaves, _flatten = jax.tree_util.tree_leaves, jax.tree_util.tree_flatten

_MAX_WAIT = 0.5  # maximum seconds that a call waits for free space or for a batch
_MAX_READERS = 8  # maximum number of readers whose last batch is kept, in case they repeat the call
_log = logging.getLogger(__name__)


class StepStack(NamedTuple):
    """K consecutive steps of the same environments. Each step begins where the previous step ended."""

    env_ids: np.ndarray  # [B] int64
    timesteps: TimeStep  # [K + 1, B, ...]
    rest: Any  # (agent_output, agent_state), each [K, B, ...]
    versions: tuple[Any, ...]  # the parameter versions that acted in the K steps


class SendBuffer:
    """Stores consecutive steps of the same environments until the steps are delivered.

    The buffer copies the steps, because environments can reuse their arrays.

    Args:
        env_ids: ids of the environments, [B] int64.
        step: the first step. Its shapes determine the shapes of the buffer. (The constructor does not store the step.)
        before: the previous buffer. If it has few steps, the new buffer is small.

    Attributes:
        count: number of steps in the buffer.
        delivered: number of delivered steps in the buffer.
        nbytes: size of one step in bytes.
    """

    def __init__(self, env_ids: np.ndarray, step: Step, before: SendBuffer | None = None) -> None:
        self._id_bytes, self._env_ids = env_ids.tobytes(), np.array(env_ids, np.int64)
        timestep, self._timestep_def = _flatten(step.timestep)
        rest, self._rest_def = _flatten((step.agent_output, step.agent_state))
        self.nbytes = sum(np.asarray(leaf).nbytes for leaf in (*timestep, *rest))
        steps = _MAX_STEPS if before is None else before.count * (4 if before.count == before._size else 1)
        self._size: int = max(1, min(_MAX_STEPS, steps, _MAX_BYTES // max(self.nbytes, 1)))
        self._timesteps, self._rest = _rows(timestep, self._size + 1), _rows(rest, self._size)
        self._versions: list[Any] = []
        self._next: Any = None  # the timestep at which the last step ended
        self.count: int = 0
        self.delivered: int = 0
        for rows, leaf in zip(self._timesteps, timestep):
            rows[0] = leaf

    def accepts(self, env_ids: np.ndarray, step: Step) -> bool:
        """Return True if the step begins where the last step ended, and the buffer is not full."""
        follows = self._next is step.timestep or self._next is None
        return follows and self.count < self._size and env_ids.tobytes() == self._id_bytes

    def put(self, step: Step) -> None:
        """Copy a step to the buffer. Call `accepts` first, and call this only if it returns True."""
        at = self.count
        for rows, leaf in zip(self._timesteps, _leaves(step.next_timestep)):
            rows[at + 1] = leaf
        for rows, leaf in zip(self._rest, _leaves((step.agent_output, step.agent_state))):
            rows[at] = leaf
        self._versions.append(step.params_version)
        self._next = step.next_timestep
        self.count = at + 1

    def stack(self, until: int) -> StepStack:
        """Return views of the undelivered steps among the first `until` steps of the buffer."""
        low = self.delivered
        timesteps = self._timestep_def.unflatten([rows[low : until + 1] for rows in self._timesteps])
        rest = self._rest_def.unflatten([rows[low:until] for rows in self._rest])
        return StepStack(self._env_ids, timesteps, rest, tuple(self._versions[low:until]))


def unstack(stack: StepStack, skip: int = 0) -> Iterator[Step]:
    """Return views of the steps in a stack, without the first `skip` steps."""
    leaves, treedef = _flatten(stack.timesteps)
    others, other_treedef = _flatten(stack.rest)
    if skip >= len(stack.versions):
        return
    following = treedef.unflatten([leaf[skip] for leaf in leaves])
    for k in range(skip, len(stack.versions)):
        timestep, following = following, treedef.unflatten([leaf[k + 1] for leaf in leaves])
        output, state = other_treedef.unflatten([leaf[k] for leaf in others])
        yield Step(timestep, output, state, stack.versions[k], following)


def _rows(leaves: list[Any], count: int) -> list[np.ndarray]:
    return [np.empty((count, *np.shape(leaf)), np.asarray(leaf).dtype) for leaf in leaves]


class WriterId(NamedTuple):
    """Identifies one claim of a rank by a writer."""

    rank: int
    incarnation: int
    num_envs: int
    nonce: int  # makes the id unique, even if a restarted service gives the same incarnation again


class ReplayService:
    """A node that contains a `ReplayBuffer`. Other processes call it with a `ServiceReplayBuffer`.

    The node can receive a call twice, so claims have a token, and steps and draws are numbered. If a service dies, the
    restarted service continues from the newest checkpoint. Later data is lost, and all writers begin new fragments.

    Args:
        agent: an Agent, or any object with `replay_spec` and `step_spec`.
        directory: directory of the checkpoint. None means no checkpoints.
        seed: seed of the random draws.
        waits: behavior of a full queue. If True, its writers wait for the reader. If False, the oldest items are
            dropped.
        run_ahead: number of items by which inserts can be ahead of `samples_per_insert`.
        seconds: seconds between two checkpoints. The wait is longer if a checkpoint takes more than 5 % of this time.
        at_end: seconds for the last checkpoint, when the program stops.
        overrides: fields of `ReplaySpec` to change.
    """

    def __init__(
        self,
        agent: Any,
        directory: str | os.PathLike | None = None,
        *,
        seed: int = 0,
        waits: bool = True,
        run_ahead: int | None = None,
        seconds: float = 30.0,
        at_end: float = 4.0,
        **overrides: Any,
    ) -> None:
        spec = override(agent.replay_spec, overrides)
        self._path = None if directory is None else pathlib.Path(directory) / "replay"
        self._seconds, self._at_end = seconds, at_end
        self._limiter = RateLimiter(spec)
        self._run_ahead = default_run_ahead(spec) if run_ahead is None else run_ahead
        self._max_items = items_kept(spec) if spec.kind == "queue" and waits else None
        if self._max_items is not None:  # writers wait, so the buffer must not overwrite items
            spec = dataclasses.replace(spec, capacity=2 * spec.capacity)
        self._buffer = ReplayBuffer(AgentSpecs(spec, agent.step_spec), seed=seed)
        self._room = threading.Condition()
        self._claims: dict[int, tuple[int, int]] = {}  # token -> (rank, incarnation)
        self._newest: dict[int, int] = {}  # rank -> newest incarnation that was claimed; also in the file of claims
        self._writers: dict[int, int] = {}  # rank -> newest incarnation that added steps
        self._next: dict[WriterId, int] = {}  # writer -> number of its next step
        self._add_locks: dict[int, threading.Lock] = collections.defaultdict(threading.Lock)  # by rank
        # Number of the reader -> (number, batch) of its last draw.
        self._answers: collections.OrderedDict[int, tuple[int, Batch | None]] = collections.OrderedDict()
        self._draw_lock = threading.Lock()
        self._stop = threading.Event()
        if self._path is not None and self._path.exists():
            self._buffer.restore(self._path)
        # A claim must not be forgotten, even if the service dies before its next checkpoint.
        self._claims_path = None if self._path is None else self._path.with_name("claims.json")
        if self._claims_path is not None and self._claims_path.exists():
            self._newest = {int(rank): newest for rank, newest in json.loads(self._claims_path.read_text()).items()}
            self._buffer.note_claims(self._newest)

    # --- for writers

    def claim(self, token: int, rank: int | None) -> tuple[int, int]:
        """Register a writer, and return its (rank, incarnation). A repeated `token` returns the same result."""
        with self._room:
            if token not in self._claims:
                self._claims[token] = claimed, incarnation = self._buffer.claim_rank(None, rank)
                self._newest[claimed] = incarnation
                if self._claims_path is not None:
                    with contextlib.suppress(OSError):  # for example a full disk, about which `_save` warns
                        write_atomically(self._claims_path, json.dumps(self._newest), parents=True)
            return self._claims[token]

    def open(self, writer: WriterId) -> None:
        """Register a writer that has already claimed its rank. Raise the errors of `add`."""
        with self._add_locks[writer.rank]:
            self._open(writer, 0)

    def add(self, writer: WriterId, number: int, stacks: list[StepStack], waits: bool = True) -> tuple[int, str]:
        """Add consecutive steps of a writer. Wait up to half a second for free space.

        Args:
            writer: the writer of the steps.
            number: number of the first step.
            stacks: the steps, in order.
            waits: wait for free space. False means to return immediately if there is no free space.

        Returns:
            (number of the first step that was not added, reason why this step must wait, or "").

        Raises:
            StoppedError: another writer has claimed the rank.
        """
        with self._add_locks[writer.rank]:
            self._open(writer, number)
            held, until = "", time.monotonic() + _MAX_WAIT * waits
            for stack in stacks:
                skip = max(self._next[writer] - number, 0)  # number of steps that an earlier call added
                for step in unstack(stack, skip):
                    if held := self._wait_for_room(until):
                        return self._next[writer], held
                    self._buffer.add(stack.env_ids, step)
                    self._next[writer] += 1
                number += len(stack.versions)
            return self._next[writer], held

    def _open(self, writer: WriterId, number: int) -> None:
        """If a writer is new, or if some of its steps were lost, register it. The writer then begins new fragments."""
        newest = self._writers.get(writer.rank, -1)
        if writer.incarnation < newest:
            raise StoppedError(f"Rank {writer.rank} was claimed again, so this writer may not add steps.")
        expected = self._next.get(writer, -1)
        if number > expected:  # the writer is new, or its steps were lost when a service died
            self._buffer.resume_rank(writer.rank, writer.incarnation, writer.num_envs)
            self._writers[writer.rank], self._next[writer] = writer.incarnation, number

    def _wait_for_room(self, until: float) -> str:
        """Wait until a step can be inserted, or until the time `until`.

        Returns:
            The reason why the step must still wait, or "" if it can be inserted.
        """
        with self._room:
            while (why := self._reason_to_wait()) and not self._stop.is_set() and time.monotonic() < until:
                self._room.wait(0.1)
        return why

    def _reason_to_wait(self) -> str:
        size = self._buffer.size
        if self._max_items is not None and size >= self._max_items:
            return f"the queue is full with {size} items, because its reader is behind"
        if self._limiter.ratio is not None:
            stats = self._buffer.stats()
            if not self._limiter.may_insert(stats["added"], stats["sampled"], self._run_ahead):
                return (
                    f"there were {stats['sampled']} samples for {stats['added']} items, less than "
                    f"{self._limiter.ratio:g} samples per insert"
                )
        return ""

    # --- for readers

    def sample(self, reader: int, number: int, wait: float = 0.0) -> Batch | None:
        """Draw a batch. Return None if there are too few items.

        Args:
            reader: the number of the reader.
            number: the number of the draw, which increases by one with each batch. A repeated number returns the same
                batch.
            wait: seconds to wait for enough items (at most half a second).
        """
        with self._draw_lock:
            last, batch = self._answers.get(reader, (-1, None))
            if last == number and batch is not None:
                return batch
            batch = self._buffer.wait_for_batch(min(wait, _MAX_WAIT)) if wait > 0.0 else self._buffer.sample()
            self._answers[reader] = number, batch
            self._answers.move_to_end(reader)
            while len(self._answers) > _MAX_READERS:
                self._answers.popitem(last=False)
        with self._room:
            self._room.notify_all()
        return batch

    def weight(self) -> float:
        """Return the total weight of all items. The probability of a shard is proportional to this weight."""
        return self._buffer.weight

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """See `ReplayReader`."""
        self._buffer.update_priorities(keys, priorities)

    def forget_before(self, version: int) -> None:
        """See `BaseReplayBuffer`."""
        self._buffer.forget_before(version)
        with self._room:
            self._room.notify_all()

    def stats(self) -> dict[str, int]:
        """See `ReplayReader`."""
        return self._buffer.stats()

    # --- methods that the program calls

    def run(self) -> None:
        """Save the replay periodically until the program ends or `stop` is called, and once more at the end."""
        with stop_with_program(self.stop):
            replay_files.save_periodically(self._save, self._stop, self._seconds, self._at_end)

    def stop(self) -> None:
        """End `run`, and all calls in which a writer waits."""
        self._stop.set()
        with self._room:
            self._room.notify_all()

    def close(self) -> None:
        """Close the replay buffer."""
        self._buffer.close()

    def _save(self) -> None:
        """Write a checkpoint. If this fails, log a warning."""
        # Also save an empty queue. If an older checkpoint were restored, the learner would get the same items again.
        if self._path is not None and self._buffer.slots:
            try:
                with SAVING:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    self._buffer.save(self._path)
            except (CheckpointError, OSError) as error:  # continue, because the data is in memory
                _log.warning("The replay service could not write a checkpoint: %s", error)
