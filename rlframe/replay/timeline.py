"""Where timesteps live: a ring of slots that all writers share, and each writer's open fragments.

Every timestep gets a number when it is allocated, and lives in the slot `number % slots` until the ring comes round.
With 100 slots, two environments and an n-step of 3:

    number  the name of a timestep: 412 and 413 are what the two environments saw last
    slot    where it lies: 12 and 13; `index(412, 2)` is slice(12, 14)
    floor   the lowest number that is still there: 314
    span    how many numbers further an item's end lies: 6 from 406 to 412, three steps of two environments
    start   the number of an item's first timestep: 406, by which tables and keys know the item

Batches are allocated in one piece, so large arrays are always written with one copy, whichever environments they
are of; an environment's next timestep is reached through a link. A writer whose every batch holds all its environments
in order ("lockstep") needs no per-environment bookkeeping: its open timesteps are one block, known by one integer.
"""

from __future__ import annotations

from typing import Any, Union

import numpy as np

from rlframe.types import global_env_ids

Index = Union[slice, np.ndarray]
Numbers = Union[int, np.ndarray]  # the first number of a block, or one number per environment
_NONE = 255  # not a step type


class Timeline:
    """Hands out timestep numbers and turns them into slots.

    Room is made `chunk` timesteps at a time: to look for evicted items at every call would cost more than to write.
    """

    def __init__(self, slots: int, chunk: int):
        self.slots, self.chunk = slots, chunk
        self.head = 0  # the next number
        self.floor = 0  # the lowest number that is still there

    def give_up(self, count: int) -> list[Index]:
        """Raise the floor so that a block of `count` fits, and return the slots that are given up for it."""
        floor, self.floor = self.floor, self.head + count - self.slots + self.chunk
        low, high = floor % self.slots, self.floor % self.slots
        if low < high:
            return [slice(low, high)]
        return [slice(low, self.slots), slice(0, high)]

    def safe(self, count: int) -> int:
        """Return the lowest number that will still be there when `count` more are allocated."""
        return max(0, self.head + count + self.chunk - self.slots)

    def index(self, numbers: Numbers, count: int) -> Index:
        """Return the slots of a block of `count` numbers (a slice where it does not wrap), or of an array."""
        if isinstance(numbers, int):
            low = numbers % self.slots
            if low + count <= self.slots:
                return slice(low, low + count)
            return (numbers + np.arange(count)) % self.slots
        return numbers % self.slots

    def slot(self, numbers: np.ndarray) -> np.ndarray:
        """Return the slots of `numbers`."""
        return numbers % self.slots

    def follow(self, slots: np.ndarray, spans: Numbers) -> np.ndarray:
        """Return the slots `spans` numbers further, for `take(mode="wrap")`."""
        return slots + spans

    def gone(self, numbers: Numbers) -> Any:
        """Return whether `numbers` were given up."""
        return numbers < self.floor

    def holds(self, numbers: np.ndarray) -> np.ndarray:
        """[B] bool: which of `numbers` (any integers) are there."""
        return (numbers >= self.floor) & (numbers < self.head)

    def living(self, slots: np.ndarray) -> np.ndarray:
        """Return the numbers that are in `slots` now."""
        numbers = slots + (self.head - self.head % self.slots)
        return np.where(numbers >= self.head, numbers - self.slots, numbers)

    def used(self, rows: np.ndarray) -> np.ndarray:
        """Return the part of an array with a row per number that was ever written."""
        return rows[: self.head]


class Fragments:
    """The open fragments of one rank's environments.

    An item may start at every `period`-th step of a fragment; the number of start j is kept in row `j % history`.
    """

    def __init__(self, rank: int, incarnation: int, num_envs: int, period: int, history: int):
        self.rank, self.incarnation, self.num_envs = rank, incarnation, num_envs
        self.period, self.history = period, history
        self.id_bytes = global_env_ids(rank, np.arange(num_envs)).tobytes()
        self.range = np.arange(num_envs)
        self.checked = False  # whether a first step was compared with the spec
        self.margin = 0  # an open block below head + margin may be overwritten by the next call
        self.origin = 0  # index of (rank, incarnation) in the buffer's table
        # The same facts in two forms, of which one is in use: in lockstep block, type_bytes, position, blocks; and
        # otherwise, for each environment, open, types, positions, starts.
        # Lockstep: the block of open timesteps, their step types, the position in the fragment, the starts' blocks.
        self.block = -1
        self.index: Index = slice(0, 0)  # the block's slots
        self.type_bytes = b""
        self.position = 0
        self.blocks = [-1] * history
        # The last `history` steps, newest first: who acted [num_envs] (not at LAST), None where all did.
        self.acting: list[np.ndarray | None] = [None] * history
        # Otherwise the same for each environment.
        self.open = np.full(num_envs, -1, np.int64)
        self.types = np.full(num_envs, _NONE, np.uint8)
        self.positions = np.zeros(num_envs, np.int64)
        self.starts = np.full((history, num_envs), -1, np.int64)
        self.ages = np.zeros(num_envs, np.int64)  # steps taken in the episode, as far as the fragment saw it

    def scatter(self) -> None:
        """Leave lockstep."""
        if self.block < 0:
            return
        self.open[:] = self.block + self.range
        self.types[:] = np.frombuffer(self.type_bytes, np.uint8)
        self.positions[:] = self.position
        self.starts[:] = np.asarray(self.blocks, np.int64)[:, None] + self.range
        self.ages[:] = 0
        unbroken = np.ones(self.num_envs, bool)
        for acting in self.acting:
            if acting is not None:
                unbroken &= acting
            self.ages += unbroken
        self.block, self.type_bytes = -1, b""

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that a checkpoint must hold. Leave lockstep; `gather` returns to it."""
        self.scatter()
        names = ("open", "types", "positions", "starts", "ages")
        return {name: getattr(self, name) for name in names}

    def gather(self, timeline: Timeline) -> None:
        """Enter lockstep if the open timesteps of all environments lie side by side."""
        if self.open[0] < 0:
            return
        position = int(self.positions[0])
        if not (self.positions == position).all() or not (self.open == self.open[0] + self.range).all():
            return
        known = self.starts[: min(self.history, -(-position // self.period))]
        if (known == known[:, :1] + self.range).all():
            self.block, self.position, self.type_bytes = int(self.open[0]), position, self.types.tobytes()
            self.index = timeline.index(self.block, self.num_envs)
            self.blocks = [int(x) for x in self.starts[:, 0]]
            self.acting = [None if (acted := self.ages > k).all() else acted for k in range(self.history)]

    def begin(self, now: np.ndarray, envs: np.ndarray) -> None:
        """Note the open timesteps `now` of `envs` as starts, if their position is a multiple of the period."""
        if self.period == 1:
            self.starts[self.positions[envs] % self.history, envs] = now
        else:
            j, rest = np.divmod(self.positions[envs], self.period)
            begins = rest == 0
            self.starts[j[begins] % self.history, envs[begins]] = now[begins]
