"""A replay buffer over the trajectory service: an ordinary Learner trains a language model from it."""

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
from rlframe.trajectories.client.background import LeaseRenewal, PrefetchingDataset
from rlframe.trajectories.client.base_client import new_key
from rlframe.trajectories.client.client import TrajectoryClient
from rlframe.trajectories.client.groups import Group, GroupWarnings, ServedBatch
from rlframe.trajectories.client.padding import bucket_lengths, pad
from rlframe.trajectories.messages import IGNORED
from rlframe.types import Batch, ReplaySpec, Sequence, Step, TokenBatch

__all__ = ["TrajectoryBuffer"]

_CLOSING = 2.0  # seconds for each call when the buffer is closed
_REMEMBERED = 4096  # batches that were learned from

_NO_WRITERS = (
    "Actors do not write to a TrajectoryBuffer: environments send their groups to the service (TrajectoryClient.post)."
)

_log = logging.getLogger(__name__)


class TrajectoryBuffer(BaseReplayBuffer):
    """Batches of a trajectory service, for one learner. Its trainer has registered before.

    A batch is a `rlframe.types.Batch` of S = batch_size sequences: `data` is a `TokenBatch`; `keys` [S, 3] int64 are
    (env_id or -1, batch_id, index in the batch); `params_version` [S] int64 is the policy version that each sequence
    was sampled from, -1 where the environment did not say.

    Batches are leased, and a thread renews the leases. A batch is acknowledged after the Learner has learned from it,
    or when the next is asked for; `close` gives back those that were not. So each is learned from at least once,
    whatever is killed; one that comes again to the same buffer is recognized and not given twice. With each request
    the service is told the Learner's version.

    Args:
        url, token, run: of the service; see `TrajectoryClient`.
        lease: seconds after which the batches of a learner that was killed are somebody else's.
        vocab_size: of the model: a group with a token outside of it is refused. None: only negative ones are outside.
        max_token_len: longer sequences are cut to so many tokens, and counted; None: what the trainer registered.
        consumer: whose the leases are; None: a name of this buffer's own.
        timeout: seconds for which the service may be away.

    Raises:
        UsageError: no trainer has registered, or an argument cannot be.
        PeerError: the service does not answer.
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
            raise UsageError(f"A TrajectoryBuffer's lease is more than 0 s; got {lease}.")
        if max_token_len is not None and max_token_len < 1:
            raise UsageError(f"A TrajectoryBuffer's max_token_len is at least 1; got {max_token_len}.")
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
                f"No trainer has registered at {self._client.url}, so nobody knows how large a batch is: call "
                "TrajectoryClient.register(batch_size=..., ...) before you make the TrajectoryBuffer."
            )
        self._buckets = bucket_lengths(max_token_len or max(1, info.max_token_len))
        steps = info.batch_size * self._buckets[-1]
        self.spec = ReplaySpec("queue", Sequence(self._buckets[-1]), info.batch_size, capacity=steps)
        self._lease = lease
        self._warnings = GroupWarnings()
        self._drawing = threading.Lock()  # a consumer asks for one batch at a time
        self._request = new_key()  # of the next batch; kept where it is not known whether one was given
        self._unanswered = False  # whether that is so
        self._renewal: LeaseRenewal | None = None  # from the first batch on
        self._lock = threading.Lock()  # of all below
        self._version: int | None = None
        self._out: set[int] = set()  # batches that were drawn and are not done with
        self._done: list[int] = []  # that are to be acknowledged
        self._learned: OrderedDict[int, None] = OrderedDict()  # the last of those that were done with
        self._read: int | None = None  # that `sample` gave last
        self._counts = dict.fromkeys(
            ("batches", "sampled", "steps", "cut", "refused", "unfit_advantages", "came_again", "lost_leases"), 0
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return self._copy, ()

    # --- reading

    def sample(self) -> Batch | None:
        """The next batch, or None while there is too little. The one that it gave before is done with.

        Raises:
            PeerError, UnavailableError: the service was away for `timeout` seconds.
        """
        return self.wait_for_batch(0.0)

    def wait_for_batch(self, timeout: float) -> Batch | None:
        """As `sample`, but waits up to `timeout` seconds (at most 60) for a batch."""
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
        """Return an endless iterator of batches, `prefetch` of which a thread draws ahead.

        A batch is done with when the next one is asked for. Each `next` waits at most `timeout` seconds; None:
        see `Dataset`. Close the dataset (or the buffer) to end it: what was drawn ahead is given back.
        """
        dataset = PrefetchingDataset(self, self._connect(), prefetch, timeout)
        self._datasets.append(dataset)
        return dataset

    def note_update(self, keys: Any, version: int) -> None:
        """See `BaseReplayBuffer`: the batch of `keys` is done with, and the service hears of `version`."""
        with self._lock:
            self._version = version
        if len(keys):
            self.finish(int(keys[0, 1]))

    @property
    def size(self) -> int:
        """Groups that wait for a batch."""
        status = self._client.status()
        return status.queue_size - status.set_aside

    def stats(self) -> dict[str, int]:
        """Counters of `BaseReplayBuffer` and more.

        `items` and `bytes` are of the service: groups that wait, and what is stored of them and of leased ones. The
        others are of this buffer: `added` and `sampled` are the sequences that it was given, `steps` their tokens,
        `batches` what they came in, `cut` sequences that were too long, `refused` groups with tokens that the model
        does not have, `unfit_advantages` sequences whose advantages were not as long as their tokens, `came_again`
        batches that were recognized, `lost_leases` those that were done with too late.
        """
        status = self._client.status()
        with self._lock:
            mine = dict(self._counts)
        service = {"items": status.queue_size, "bytes": status.stored_bytes}
        return {**dict.fromkeys(STATS, 0), **service, "added": mine["sampled"], **mine}

    def close(self) -> None:
        """Stop the datasets, acknowledge what was learned from, and give back the rest. Twice does nothing more."""
        if self._closed:
            return
        super().close()
        if self._renewal is not None:
            self._renewal.close()
        with self._lock:
            left = sorted(self._out)
        self.give_back(left)
        self._client.close()

    # --- what its datasets do

    def draw(self, client: TrajectoryClient, wait: float) -> Batch | None:
        """The next batch, leased; None if none came in `wait` seconds. What is done with is acknowledged first."""
        with self._drawing:
            self._acknowledge(client)
            self._unanswered = True
            served = client.batch(wait=wait, lease=self._lease, policy_version=self._version, request=self._request)
            self._request, self._unanswered = new_key(), False
            if served is None or self._came_again(served) or not self._check_tokens(served):
                return None
            self._warnings.look(served.groups)
            data, cut = pad(served.groups, self._buckets)
            with self._lock:
                self._out.add(served.batch_id)
                self._count(served, data, cut)
            if self._renewal is None and not self._closed:
                self._renewal = LeaseRenewal(self._renew, self._lease / 3)
            return _batch(served, data)

    def finish(self, batch_id: int | None) -> None:
        """A batch is done with, and will be acknowledged with the next request. Nothing where it was already."""
        with self._lock:
            if batch_id in self._out:
                self._out.remove(batch_id)
                self._remember(batch_id)
                self._done.append(batch_id)

    def give_back(self, batch_ids: list[int]) -> None:
        """Acknowledge what is done with, and give these back, if the service answers soon."""
        with self._lock:
            self._out.difference_update(batch_ids)
        try:
            self._acknowledge(self._client, _CLOSING)
            if self._unanswered and self._closed:
                batch_ids = batch_ids + self._given_unheard()
            for batch_id in batch_ids:
                self._client.nack(batch_id, timeout=_CLOSING)
        except RlframeError as error:
            _log.warning("Batches were not given back, and will be served again %g s later: %s", self._lease, error)

    def _given_unheard(self) -> list[int]:
        """The batch that answered a request which was interrupted: the same request gets the same answer."""
        served = self._client.batch(lease=self._lease, request=self._request, timeout=_CLOSING)
        self._unanswered = False
        return [] if served is None else [served.batch_id]

    def _renew(self) -> None:
        """Have the leases of the batches that are not done with begin anew."""
        with self._lock:
            out = sorted(self._out)
        try:
            for batch_id in out:
                self._client.renew(batch_id, self._lease, timeout=self._lease / 3)
        except RlframeError as error:  # who is done with a batch will see whether the lease was lost
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
            "Batch %d was no longer leased when it was done with: others may have learned from it, too. Its lease of "
            "%g s could not be renewed, or the run has started afresh.",
            batch_id,
            self._lease,
        )

    def _check_tokens(self, served: ServedBatch) -> bool:
        """Take all that could be learned out of groups with unknown tokens. False: nothing is left of the batch."""
        unknown = [(i, token) for i, group in enumerate(served.groups) if (token := self._unknown(group)) is not None]
        if not unknown:
            return True
        with self._lock:
            first = not self._counts["refused"]
            self._counts["refused"] += len(unknown)
        if first:
            index, token = unknown[0]
            known = "tokens are not negative" if self._vocab_size is None else f"there are 0 to {self._vocab_size - 1}"
            _log.warning(
                "A group of environment %s has the token %d, but %s: such groups are not learned from, and are "
                "acknowledged; from now on they are counted (refused). Is its tokenizer the model's?",
                *(served.groups[index].env_id, token, known),
            )
        if len(unknown) == len(served.groups):
            with self._lock:
                self._remember(served.batch_id)
                self._done.append(served.batch_id)
            return False
        for index, _ in unknown:
            served.groups[index] = _without_tokens(served.groups[index])
        return True

    def _unknown(self, group: Group) -> int | None:
        above = np.inf if self._vocab_size is None else self._vocab_size
        found = (int(row[wrong][0]) for row in group.tokens if (wrong := (row < 0) | (row >= above)).any())
        return next(found, None)

    def _came_again(self, served: ServedBatch) -> bool:
        """Whether this buffer has the batch, or had it: then it is acknowledged again, or its lease is a new one."""
        batch_id = served.batch_id
        with self._lock:
            if not served.redelivered:  # of a service with an empty store, which counts from 0 on
                self._learned.pop(batch_id, None)
                return False
            if batch_id in self._learned:
                self._done.append(batch_id)
            elif batch_id not in self._out:
                return False
            self._counts["came_again"] += 1
            return True

    def _remember(self, batch_id: int) -> None:
        self._learned[batch_id] = None
        while len(self._learned) > _REMEMBERED:
            self._learned.popitem(last=False)

    def _count(self, served: ServedBatch, data: TokenBatch, cut: int) -> None:
        counts = self._counts
        unfit = [group for group in served.groups for row in group.advantages or () if row is None]
        if unfit and not counts["unfit_advantages"]:
            _log.warning(
                "%d sequences of a batch, the first of environment %s, have advantages that are not as long as their "
                "tokens: they are learned from without; from now on they are counted.",
                len(unfit),
                unfit[0].env_id,
            )
        counts["unfit_advantages"] += len(unfit)
        counts["batches"] += 1
        counts["sampled"] += len(data.lengths)
        counts["steps"] += int(data.lengths.sum())
        if cut and not counts["cut"]:
            _log.warning(
                "%d sequences of a batch are longer than %d tokens and are cut to it; from now on they are counted.",
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
    """The group with nothing to learn from: a batch stays as large as it is."""
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
