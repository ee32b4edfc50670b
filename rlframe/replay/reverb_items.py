"""Items on their way to a Reverb server, and back from it."""

from __future__ import annotations

import collections

import numpy as np

from rlframe.replay.local import ReplayBuffer
from rlframe.replay.rows import ItemRows
from rlframe.types import AgentSpecs, Batch, Sequence, Step

_REMEMBERED = 1 << 17  # drawn items
_KEY, _PROBABILITY, _SIZE, _ROWS = 0, 1, 2, 4  # places in what a sampler gives
_SLOWER = 8  # an environment may be so many times slower than its actor's others without losing its open items


class Assembler:
    """Completes the items of one writer in this process's memory, and gives them up as soon as they are complete.

    Args:
        agent: what the items are.
        rank: of the writer.
        incarnation: of the writer.
        num_envs: how many environments it has.
    """

    def __init__(self, agent: AgentSpecs, rank: int, incarnation: int, num_envs: int) -> None:
        self.rank, self.num_envs = rank, num_envs
        self._writer = rank, incarnation
        self._next = 0
        self._open = _OpenItems(agent, num_envs)
        self._open.claim_rank(num_envs, rank)

    def add(self, env_ids: np.ndarray, step: Step) -> Batch | None:
        """Adds a step, and returns the items that it completed, the oldest first."""
        self._open.add(env_ids, step)
        return self._open.sample()

    def number(self, batch: Batch, at_least: int) -> Batch:
        """Gives the items of `batch` the next numbers, from `at_least` on."""
        first = max(self._next, at_least)
        self._next = first + len(batch.keys)
        batch.keys[:, :2] = self._writer
        batch.keys[:, 2] = np.arange(first, self._next)
        return batch


class _OpenItems(ReplayBuffer):
    """A buffer just large enough for what is not complete, whose every batch is all that is."""

    def __init__(self, agent: AgentSpecs, num_envs: int) -> None:
        item = agent.replay_spec.item
        steps = item.length if isinstance(item, Sequence) else item.n_step
        super().__init__(
            agent,
            kind="queue",
            batch_size=None,
            capacity=_SLOWER * num_envs * (steps + 4),
            min_size=1,
            samples_per_insert=None,
        )

    def _batch_size(self) -> int:
        return max(1, self.size)


class Remembered:
    """The server's keys of the items that were drawn last: their priorities may still come."""

    def __init__(self) -> None:
        self._keys: dict[tuple[int, ...], int] = {}

    def put(self, keys: np.ndarray, server_keys: list[np.ndarray]) -> None:
        """Notes the server's keys of the items `keys` [B, 3]."""
        for key, server_key in zip(map(tuple, keys.tolist()), server_keys):
            self._keys.pop(key, None)
            self._keys[key] = int(server_key)
        while len(self._keys) > _REMEMBERED:
            del self._keys[next(iter(self._keys))]

    def find(self, keys: np.ndarray, floor: int) -> list[int | None]:
        """The server's keys of the items `keys` [B, 3]; None of one that is not known, or numbered below `floor`."""
        return [self._keys.get(key) if key[2] >= floor else None for key in map(tuple, keys.tolist())]


class Drawn:
    """Items that were drawn and not given out yet, in order.

    Attributes:
        size: how many.
        came: how many of each rank ever came, where a batch is one item of each environment.
        forgotten: how many were dropped for their age.
    """

    def __init__(self, rows: ItemRows, queue: bool, by_rank: bool) -> None:
        self._rows, self._queue, self._by_rank = rows, queue, by_rank
        # As samplers give them: [key, probability, size of the table, priority, rows [block, nbytes]].
        self._samples: collections.deque[list[np.ndarray]] = collections.deque()
        self._oldest = -1
        self._single = True  # each draw is one item: none was a block of several yet
        self.came: collections.Counter[int] = collections.Counter()
        self.size = self.forgotten = 0

    def put(self, samples: list[list[np.ndarray]]) -> None:
        """Notes what a sampler gave."""
        if samples and len(samples[0][_ROWS]) > 1:
            self._single = False
            for sample in samples:
                if not self._rows.numbers(sample[_ROWS])[-1] >= 0:  # padding comes last
                    sample[_ROWS] = sample[_ROWS][self._rows.numbers(sample[_ROWS]) >= 0]
        if self._by_rank:
            for sample in samples:
                self.came.update(self._rows.ranks(sample[_ROWS]).tolist())
        self._samples.extend(samples)
        self.size += len(samples) if self._single else sum([len(sample[_ROWS]) for sample in samples])
        if self._oldest >= 0:
            self.forget_before(self._oldest)

    def forget_before(self, version: int) -> None:
        """Drops items that a version below `version` acted in, now and when they come."""
        self._oldest = max(self._oldest, version)
        kept = []
        for sample in self._samples:
            fresh = self._rows.versions(sample[_ROWS]) >= self._oldest
            if not fresh.all():
                sample = [*sample[:_ROWS], sample[_ROWS][fresh]]
            if len(sample[_ROWS]):
                kept.append(sample)
        before, self.size = self.size, sum(len(sample[_ROWS]) for sample in kept)
        self.forgotten += before - self.size
        self._samples = collections.deque(kept)

    def items_of(self) -> dict[int, int]:
        """How many of each rank there are."""
        counts: collections.Counter[int] = collections.Counter()
        for sample in self._samples:
            counts.update(self._rows.ranks(sample[_ROWS]).tolist())
        return counts

    def take(self, count: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Returns (rows [count, nbytes] uint8, probabilities [count] float32, the server's key of each)."""
        if self._single and count <= len(self._samples):
            return self._take_single(count)
        samples, missing = [], count
        while missing > 0:
            sample = self._samples.popleft()
            samples.append(sample)
            missing -= len(sample[_ROWS])
        rows = [sample[_ROWS] for sample in samples]
        if missing:  # the last block has more than are wanted
            self._samples.appendleft([*samples[-1][:_ROWS], rows[-1][missing:]])
            rows[-1] = rows[-1][:missing]
        self.size -= count
        chances = [float(sample[_PROBABILITY]) for sample in samples]
        if self._queue:  # each has its turn: the chance of a draw among those that were there
            chances = [1.0 / (max(1, int(sample[_SIZE])) * len(own)) for sample, own in zip(samples, rows)]
        keys = [sample[_KEY] for sample in samples]
        lengths = [len(own) for own in rows]
        all_rows = rows[0] if len(rows) == 1 else np.concatenate(rows)
        return all_rows, np.repeat(np.array(chances, np.float32), lengths), keys

    def _take_single(self, count: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """The same where each draw is one item: there are hundreds in a batch, so each line of a loop counts."""
        pop = self._samples.popleft
        keys, chances, sizes, _, rows = zip(*[pop() for _ in range(count)])
        self.size -= count
        if self._queue:
            probabilities = (1.0 / np.maximum(np.fromiter(sizes, np.int64, count), 1)).astype(np.float32)
        else:
            probabilities = np.fromiter(chances, np.float32, count)
        return np.concatenate(rows), probabilities, list(keys)
