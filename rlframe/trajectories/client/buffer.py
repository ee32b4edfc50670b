"""A replay buffer that reads from the trajectory service, so that an ordinary Learner can train a language model."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections import OrderedDict
from typing import Any, NoReturn

import numpy as np

from rlframe.errors import RlframeError, UsageError
from rlframe.replay.base import STATS, BaseReplayBuffer
from rlframe.trajectories.client.base_client import new_key
from rlframe.trajectories.client.batches import LeaseRenewal, PrefetchingDataset, bucket_lengths, pad
from rlframe.trajectories.client.client import TrajectoryClient
from rlframe.trajectories.client.groups import Group, GroupWarnings, ServedBatch
from rlframe.trajectories.messages import IGNORED
from rlframe.types import Batch, ReplaySpec, Sequence, Step, TokenBatch

__all__ = ["TrajectoryBuffer"]

_CLOSE_TIMEOUT = 2.0  # seconds for each call while the buffer closes
_MAX_FINISHED_IDS = 4096  # maximum number of finished batches whose ids are kept

_NO_WRITERS = (
    "Actors do not write to a TrajectoryBuffer: environments send their groups to the service (TrajectoryClient.post)."
)

_log = logging.getLogger(__name__)


class TrajectoryBuffer(BaseReplayBuffer):
    """Gets batches from a trajectory service for one learner. A trainer must register before the buffer is created.

    A batch is a `rlframe.types.Batch` of S = batch_size sequences: `data` is a `TokenBatch`; `keys` [S, 3] int64 are
    (env_id or -1, batch_id, index in the batch); `params_version` [S] int64 is the policy version that each sequence
    was sampled from, or -1 if the environment did not send it.

    Batches are leased, and a thread renews the leases. The buffer acknowledges a batch after the Learner has learned
    from it, or when the next batch is requested. `close` returns unfinished batches to the service. So the Learner
    learns from each batch at least once, even if processes are killed. If the service delivers a batch twice to this
    buffer, the buffer skips the second delivery. Each request contains the Learner's params version.

    Args:
        url, token, run: Address, token and run of the service. See `TrajectoryClient`.
        lease: Seconds after which another learner can get the unfinished batches of a killed learner.
        vocab_size: Vocabulary size of the model. Groups with other tokens are refused. None means that only negative
            tokens are refused.
        max_token_len: Maximum number of tokens in a sequence. Longer sequences are truncated and counted. None means
            the registered value.
        consumer: Name of the owner of the leased batches. None means a name that is unique to this buffer.
        timeout: Seconds that a call waits for an unreachable service before it raises.

    Raises:
        UsageError: No trainer has registered, or an argument is invalid.
        PeerError: The service does not answer.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        run: str | None = None,
        lease: float = 120.0,
        vocab_size: int | None = None,
        max_token_len: int | None = None,
        consumer: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        if lease <= 0:
            raise UsageError(f"The lease of a TrajectoryBuffer must be more than 0 s; got {lease}.")
        if max_token_len is not None and max_token_len < 1:
            raise UsageError(f"The max_token_len of a TrajectoryBuffer must be at least 1; got {max_token_len}.")
        options: dict[str, Any] = {"token": token, "run": run, "timeout": timeout}
        self._copy = functools.partial(
            TrajectoryBuffer,
            url,
            lease=lease,
            vocab_size=vocab_size,
            max_token_len=max_token_len,
            consumer=consumer,
            **options,
        )
        self._vocab_size = vocab_size
        self._client = TrajectoryClient(url, consumer=consumer, **options)
        self._connect = functools.partial(TrajectoryClient, url, consumer=self._client.consumer, **options)
        info = self._client.info()
        if info.batch_size < 1:
            self._client.close()
            raise UsageError(
                f"No trainer has registered at {self._client.url}, so the batch size is unknown. Call "
                "TrajectoryClient.register(batch_size=..., ...) before you create the TrajectoryBuffer."
            )
        self._buckets = bucket_lengths(max_token_len or max(1, info.max_token_len))
        steps = info.batch_size * self._buckets[-1]
        self.spec = ReplaySpec("queue", Sequence(self._buckets[-1]), info.batch_size, capacity=steps)
        self._lease = lease
        self._warnings = GroupWarnings()
        self._drawing = threading.Lock()  # allows only one request for a batch at a time
        self._request = new_key()  # key of the next request; if a request gets no answer, its key is used again
        self._unanswered = False  # True if the last request got no answer
        self._renewal: LeaseRenewal | None = None  # the thread starts when the first batch arrives
        self._lock = threading.Lock()  # protects the fields below
        self._version: int | None = None
        self._out: set[int] = set()  # leased batches that are not finished
        self._done: list[int] = []  # finished batches to acknowledge
        self._learned: OrderedDict[int, None] = OrderedDict()  # latest finished batches, oldest first
        self._read: int | None = None  # id of the last batch that `sample` returned
        self._counts = dict.fromkeys(
            ("batches", "sampled", "steps", "cut", "refused", "unfit_advantages", "came_again", "lost_leases"), 0
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return self._copy, ()

    # --- reading

    def sample(self) -> Batch | None:
        """Return the next batch, or None if too few sequences are queued. Mark the previous batch as finished.

        Raises:
            PeerError, UnavailableError: The service was unreachable for `timeout` seconds.
        """
        return self.wait_for_batch(0.0)

    def wait_for_batch(self, timeout: float) -> Batch | None:
        """Wait up to `timeout` seconds (at most 60) for a batch. Otherwise like `sample`."""
        if self._closed:
            return None
        with self._lock:
            read, self._read = self._read, None
        self.finish(read)
        batch = self.draw(self._client, timeout)
        with self._lock:
            self._read = None if batch is None else int(batch.keys[0, 1])
        return batch

    def make_dataset(self, prefetch: int = 1, timeout: float | None = None) -> PrefetchingDataset:
        """Return an endless iterator of batches. A thread prefetches `prefetch` of them.

        A batch is finished when the next batch is requested. Each `next` waits at most `timeout` seconds. (`Dataset`
        describes None.) To end the iterator, close it or the buffer. This returns prefetched batches to the service.
        """
        dataset = PrefetchingDataset(self, self._connect(), prefetch, timeout)
        self._datasets.append(dataset)
        return dataset

    def note_update(self, keys: Any, version: int) -> None:
        """Mark the batch of `keys` as finished, and send `version` with the next request. See `BaseReplayBuffer`."""
        with self._lock:
            self._version = version
        if len(keys):
            self.finish(int(keys[0, 1]))

    @property
    def size(self) -> int:
        """Number of queued groups, without groups that are set aside."""
        status = self._client.status()
        return status.queue_size - status.set_aside

    def stats(self) -> dict[str, int]:
        """Return the counters of `BaseReplayBuffer`, and more counters.

        `items` is the number of groups in the service's queue. `bytes` is the size of the service's queued and leased
        groups. The other counters describe this buffer:

        - `batches`: batches received.
        - `added`, `sampled`: sequences received.
        - `steps`: tokens received.
        - `cut`: truncated sequences.
        - `refused`: groups with tokens outside the vocabulary.
        - `unfit_advantages`: sequences whose advantages and tokens differ in length.
        - `came_again`: redelivered batches that were skipped.
        - `lost_leases`: batches whose lease ended before the Learner finished them.
        """
        status = self._client.status()
        with self._lock:
            mine = dict(self._counts)
        service = {"items": status.queue_size, "bytes": status.stored_bytes}
        return {**dict.fromkeys(STATS, 0), **service, "added": mine["sampled"], **mine}

    def close(self) -> None:
        """Stop the datasets, acknowledge finished batches, and return all other batches to the service.

        A second call does nothing.
        """
        if self._closed:
            return
        super().close()
        if self._renewal is not None:
            self._renewal.close()
        with self._lock:
            left = sorted(self._out)
        self.give_back(left)
        self._client.close()

    # --- Methods for the datasets

    def draw(self, client: TrajectoryClient, wait: float) -> Batch | None:
        """Return the next batch with a lease, or None after `wait` seconds. Acknowledge finished batches first."""
        with self._drawing:
            self._acknowledge(client)
            self._unanswered = True
            served = client.batch(wait=wait, lease=self._lease, policy_version=self._version, request=self._request)
            self._request, self._unanswered = new_key(), False
            if served is None or self._is_redelivered(served) or not self._check_tokens(served):
                return None
            self._warnings.warn_once(served.groups)
            data, cut = pad(served.groups, self._buckets)
            with self._lock:
                self._out.add(served.batch_id)
                self._count(served, data, cut)
            if self._renewal is None and not self._closed:
                self._renewal = LeaseRenewal(self._renew, self._lease / 3)
            return _batch(served, data)

    def finish(self, batch_id: int | None) -> None:
        """Mark a batch as finished. The next request acknowledges the batch. A second call does nothing."""
        with self._lock:
            if batch_id in self._out:
                self._out.remove(batch_id)
                self._mark_finished(batch_id)

    def give_back(self, batch_ids: list[int]) -> None:
        """Acknowledge finished batches, and return the batches `batch_ids`. If the service is too slow, only warn."""
        with self._lock:
            self._out.difference_update(batch_ids)
        try:
            self._acknowledge(self._client, _CLOSE_TIMEOUT)
            if self._unanswered and self._closed:
                batch_ids = batch_ids + self._undelivered_batch_ids()
            for batch_id in batch_ids:
                self._client.nack(batch_id, timeout=_CLOSE_TIMEOUT)
        except RlframeError as error:
            _log.warning(
                "Batches could not be returned. The service delivers them again after %g s: %s", self._lease, error
            )

    def _undelivered_batch_ids(self) -> list[int]:
        """Repeat a request that got no answer. The service repeats its answer. Return [batch id] or []."""
        served = self._client.batch(lease=self._lease, request=self._request, timeout=_CLOSE_TIMEOUT)
        self._unanswered = False
        return [] if served is None else [served.batch_id]

    def _renew(self) -> None:
        """Renew the leases of all unfinished batches."""
        with self._lock:
            out = sorted(self._out)
        try:
            for batch_id in out:
                self._client.renew(batch_id, self._lease, timeout=self._lease / 3)
        except RlframeError as error:  # continue, because `_acknowledge` detects lost leases
            if not self._closed:
                _log.warning("A lease of %g s could not be renewed: %s", self._lease, error)

    def _acknowledge(self, client: TrajectoryClient, timeout: float | None = None) -> None:
        with self._lock:
            done, self._done = self._done, []
        try:
            while done:
                if not client.ack(done[0], timeout=timeout):
                    self._note_lost(done[0])
                del done[0]
        finally:
            with self._lock:
                self._done = done + self._done

    def _note_lost(self, batch_id: int) -> None:
        with self._lock:
            self._counts["lost_leases"] += 1
        _log.warning(
            "Batch %d was no longer leased when it was finished: another learner may have learned from it too. "
            "Its lease of %g s could not be renewed, or the run was reset.",
            batch_id,
            self._lease,
        )

    def _check_tokens(self, served: ServedBatch) -> bool:
        """Exclude groups with invalid tokens from training. Return False if all groups have invalid tokens."""
        unknown = [(i, token) for i, group in enumerate(served.groups) if (token := self._unknown(group)) is not None]
        if not unknown:
            return True
        with self._lock:
            first = not self._counts["refused"]
            self._counts["refused"] += len(unknown)
        if first:
            index, token = unknown[0]
            known = (
                "tokens must not be negative"
                if self._vocab_size is None
                else f"the model's tokens are 0 to {self._vocab_size - 1}"
            )
            _log.warning(
                "A group of environment %s has the token %d, but %s. The learner does not train on such groups, and "
                "`refused` counts them. This is logged once. Does the environment use the model's tokenizer?",
                *(served.groups[index].env_id, token, known),
            )
        if len(unknown) == len(served.groups):
            with self._lock:
                self._mark_finished(served.batch_id)
            return False
        for index, _ in unknown:
            served.groups[index] = _without_tokens(served.groups[index])
        return True

    def _unknown(self, group: Group) -> int | None:
        above = np.inf if self._vocab_size is None else self._vocab_size
        found = (int(row[wrong][0]) for row in group.tokens if (wrong := (row < 0) | (row >= above)).any())
        return next(found, None)

    def _is_redelivered(self, served: ServedBatch) -> bool:
        """Return True if this buffer already received the batch. If the batch is finished, acknowledge it again."""
        batch_id = served.batch_id
        with self._lock:
            if not served.redelivered:  # ids can repeat: a service with a new store counts from 0
                self._learned.pop(batch_id, None)
                return False
            if batch_id in self._learned:
                self._done.append(batch_id)
            elif batch_id not in self._out:
                return False
            self._counts["came_again"] += 1
            return True

    def _mark_finished(self, batch_id: int) -> None:
        self._done.append(batch_id)
        self._learned[batch_id] = None
        while len(self._learned) > _MAX_FINISHED_IDS:
            self._learned.popitem(last=False)

    def _count(self, served: ServedBatch, data: TokenBatch, cut: int) -> None:
        counts = self._counts
        unfit = [group for group in served.groups for row in group.advantages or () if row is None]
        if unfit and not counts["unfit_advantages"]:
            _log.warning(
                "%d sequences of a batch (the first from environment %s) have advantages of another length than their "
                "tokens. These advantages are ignored. This is logged once; `unfit_advantages` counts them.",
                len(unfit),
                unfit[0].env_id,
            )
        counts["unfit_advantages"] += len(unfit)
        counts["batches"] += 1
        counts["sampled"] += len(data.lengths)
        counts["steps"] += int(data.lengths.sum())
        if cut and not counts["cut"]:
            _log.warning(
                "%d sequences of a batch are longer than %d tokens and were truncated. This is logged once; "
                "`cut` counts them.",
                cut,
                self._buckets[-1],
            )
        counts["cut"] += cut

    # --- writing

    def claim_rank(self, num_envs: int | None = None, rank: int | None = None) -> NoReturn:
        raise UsageError(_NO_WRITERS)

    def open_segment(self, rank: int, num_envs: int) -> NoReturn:
        raise UsageError(_NO_WRITERS)

    def add(self, env_ids: np.ndarray, step: Step) -> NoReturn:
        raise UsageError(_NO_WRITERS)


def _without_tokens(group: Group) -> Group:
    """Return a group of the same size that has no effect on training."""
    tokens = [np.zeros_like(row) for row in group.tokens]
    masks = [np.full_like(row, IGNORED) for row in group.masks]
    return dataclasses.replace(group, tokens=tokens, masks=masks, scores=np.zeros(len(group)), advantages=None)


def _batch(served: ServedBatch, data: TokenBatch) -> Batch:
    count = len(data.lengths)
    env_ids = [-1 if group.env_id is None else group.env_id for group in served.groups]
    versions = [-1 if group.policy_version is None else group.policy_version for group in served.groups]
    keys = np.stack([np.take(env_ids, data.group), np.full(count, served.batch_id), np.arange(count)], axis=1)
    params_version = np.take(versions, data.group).astype(np.int64)
    return Batch(data, keys.astype(np.int64), np.full(count, 1.0 / count, np.float32), params_version)
