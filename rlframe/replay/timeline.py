"""Where timesteps live: a ring of slots that all writers share, and each writer's open fragments.

Every timestep gets a number when it is allocated, and lives in the slot `number % slots` until the ring comes round.
With 100 slots, two environments and an n-step of 3:

    number  the name of a timestep: 412 and 413 are what the two environments saw last
    slot    where it lies: 12 and 13 (`slots_of`)
    block   the numbers of one batch, known by the first one: 412
    index   the slots of a block, as arrays are indexed: `index(412, 2)` is slice(12, 14)
    floor   the lowest number that is still there: 314
    start   the number of an item's first timestep: 406, by which tables and keys know the item
    span    how many numbers further an item's end lies: 6 from 406 to 412, three steps of two environments
    origin  which (rank, incarnation) wrote a slot, as a number from 0

Batches are allocated in one piece, so large arrays are always written with one copy, whichever environments they
are of. An environment's next timestep is found by adding the span of one step.
"""

from __future__ import annotations

from typing import Any, Union

import numpy as np

from rlframe.types import global_env_ids

Index = Union[slice, np.ndarray]
Numbers = Union[int, np.ndarray]  # the first number of a block, or one number per environment
Mask = Union[bool, np.ndarray]  # [B] bool: which environments; True: all, False: none
_NONE = 255  # not a step type


def ring_index(first: int, count: int, size: int, base: int = 0) -> Index:
    """Return the places of `count` numbers from `first` on in a ring of `size`: a slice if they do not wrap.

    The ring begins at the place `base`.
    """
    low = first % size
    return slice(base + low, base + low + count) if low + count <= size else base + (low + np.arange(count)) % size


def numbers_of(block: int, count: int, mask: Mask = True) -> np.ndarray:
    """Return the numbers of a block that `mask` holds."""
    return np.arange(block, block + count) if isinstance(mask, bool) else block + mask.nonzero()[0]


class Timeline:
    """Hands out timestep numbers and turns them into slots.

    Room is made `chunk` timesteps at a time: to look for evicted items at every call would cost more than to write.
    """

    def __init__(self, slots: int, chunk: int):
        self.slots, self.chunk = slots, chunk
        self.head = 0  # the next number
        self.floor = 0  # the lowest number that is still there

    def raise_floor(self, count: int) -> list[Index]:
        """Raise the floor so that a block of `count` fits, and return the slots that are given up for it."""
        floor, self.floor = self.floor, self.head + count - self.slots + self.chunk
        low, high = floor % self.slots, self.floor % self.slots
        if low < high:
            return [slice(low, high)]
        return [slice(low, self.slots), slice(0, high)]

    def floor_after_allocating(self, count: int) -> int:
        """Return the lowest number that will still be there when `count` more are allocated."""
        return max(0, self.head + count + self.chunk - self.slots)

    def index(self, numbers: Numbers, count: int) -> Index:
        """Return the slots of a block of `count` numbers (a slice where it does not wrap), or of an array."""
        if isinstance(numbers, int):
            low = numbers % self.slots
            if low + count <= self.slots:  # the usual case, without another call
                return slice(low, low + count)
            numbers = numbers_of(numbers, count)
        return self.slots_of(numbers)

    def slots_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the slots of `numbers`."""
        return numbers % self.slots

    def follow(self, slots: np.ndarray, spans: Numbers) -> np.ndarray:
        """Return the slots `spans` numbers further, for `take(mode="wrap")`."""
        return slots + spans

    def is_evicted(self, numbers: Numbers) -> Any:
        """Return whether `numbers` were given up."""
        return numbers < self.floor

    def holds(self, numbers: np.ndarray) -> np.ndarray:
        """[B] bool: which of `numbers` (any integers) are there."""
        return (numbers >= self.floor) & (numbers < self.head)

    def numbers_in(self, slots: np.ndarray) -> np.ndarray:
        """Return the numbers that are in `slots` now."""
        numbers = slots + (self.head - self.head % self.slots)
        return np.where(numbers >= self.head, numbers - self.slots, numbers)

    def used(self, rows: np.ndarray) -> np.ndarray:
        """Return the part of an array with a row per number that was ever written."""
        return rows[: self.head]


class WriterFragments:
    """The open fragments of one rank's environments.

    A fragment is an environment's timesteps without a gap. Its last timestep is open: the next step continues it. An
    item may start at every `period`-th step of a fragment. The number of start n, from 0, is kept in row `n % history`.

    A writer whose every batch holds all its environments in order is in lockstep. Then its open timesteps are one
    block, and one integer is enough for all environments. `enter_lockstep` enters this form, `leave_lockstep` leaves it. In the
    example above, after 6 steps from number 400 on, with a period of 1 and a history of 3:

        fact                             in lockstep                      else, for each environment
        open timesteps                   open_block = 412                 open = [412, 413]
        their step types                 type_bytes: MID MID              types = [MID, MID]
        steps since the fragment began   position = 6                     positions = [6, 6]
        newest starts                    start_blocks = [406, 408, 410]   starts = [[406, 407], [408, 409], [410, 411]]
        steps in the same episode        unbroken = [True, True, True]    ages = [3, 3]

    `unbroken[k]` is a `Mask` of the environments that acted (not at LAST) in each of the last k + 1 steps: those of an
    age above k. `ages` counts up to `history`. Out of lockstep, `open_block` is -1.

    `begin` and `count_acting` note a step. Then `starts_before` and `starts_in_episode` answer for both forms. Their
    argument `envs` is [B], or None: all, in lockstep.
    """

    def __init__(self, rank: int, incarnation: int, num_envs: int, period: int, history: int):
        self.rank, self.incarnation, self.num_envs = rank, incarnation, num_envs
        self.period, self.history = period, history
        self.id_bytes = global_env_ids(rank, np.arange(num_envs)).tobytes()
        self.range = np.arange(num_envs)
        self.checked = False  # whether a first step was compared with the spec
        self.margin = 0  # an open block below head + margin may be overwritten by the next call
        self.origin = 0  # index of (rank, incarnation) in the buffer's table
        # In lockstep:
        self.open_block = -1
        self.type_bytes = b""
        self.position = 0
        self.start_blocks = [-1] * history
        self.unbroken: list[Mask] = [True] * history
        # Else:
        self.open = np.full(num_envs, -1, np.int64)
        self.types = np.full(num_envs, _NONE, np.uint8)
        self.positions = np.zeros(num_envs, np.int64)
        self.starts = np.full((history, num_envs), -1, np.int64)
        self.ages = np.zeros(num_envs, np.int64)

    def leave_lockstep(self) -> None:
        """Leave lockstep."""
        if self.open_block < 0:
            return
        self.open[:] = self.open_block + self.range
        self.types[:] = np.frombuffer(self.type_bytes, np.uint8)
        self.positions[:] = self.position
        self.starts[:] = np.asarray(self.start_blocks, np.int64)[:, None] + self.range
        self.ages[:] = 0
        for unbroken in self.unbroken:
            self.ages += unbroken
        self.open_block, self.type_bytes = -1, b""

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that a checkpoint must hold. Leave lockstep; `enter_lockstep` returns to it."""
        self.leave_lockstep()
        names = ("open", "types", "positions", "starts", "ages")
        return {name: getattr(self, name) for name in names}

    def enter_lockstep(self) -> None:
        """Enter lockstep if the open timesteps of all environments lie side by side."""
        if self.open[0] < 0:
            return
        position = int(self.positions[0])
        if not (self.positions == position).all() or not (self.open == self.open[0] + self.range).all():
            return
        known = self.starts[: min(self.history, -(-position // self.period))]
        if (known == known[:, :1] + self.range).all():
            self.open_block, self.position, self.type_bytes = int(self.open[0]), position, self.types.tobytes()
            self.start_blocks = [int(x) for x in self.starts[:, 0]]
            self.unbroken = [True if (older := self.ages > k).all() else older for k in range(self.history)]

    def begin(self, numbers: Any, envs: np.ndarray | None) -> None:
        """Note the open timesteps `numbers` of `envs` as starts, if their position is a multiple of the period."""
        if envs is None:
            if self.position % self.period == 0:
                self.start_blocks[self.position // self.period % self.history] = numbers
        elif self.period == 1:
            self.starts[self.positions[envs] % self.history, envs] = numbers
        else:
            nth_start, rest = np.divmod(self.positions[envs], self.period)
            begins = rest == 0
            self.starts[nth_start[begins] % self.history, envs[begins]] = numbers[begins]

    def starts_before(self, steps: int, envs: np.ndarray | None) -> Numbers:
        """Return the starts so many steps before the open timesteps; any number where `have_start_before` is False."""
        if envs is None:
            return self.start_blocks[(self.position - steps) // self.period % self.history]
        return self.starts[(self.positions[envs] - steps) // self.period % self.history, envs]

    def have_start_before(self, steps: int, envs: np.ndarray | None) -> Mask:
        """Return which of `envs` have a start so many steps before the open timesteps."""
        position = (self.position if envs is None else self.positions[envs]) - steps
        return (position >= 0) & (position % self.period == 0)

    def count_acting(self, acting: Mask, envs: np.ndarray | None) -> None:
        """Note which of `envs` are `acting` in this step, and not at LAST."""
        if envs is None:
            older = self.unbroken[:-1]
            self.unbroken = [acting, *(older if acting is True else [acting & each for each in older])]
        else:
            self.ages[envs] = np.where(acting, np.minimum(self.ages[envs] + 1, self.history), 0)

    def starts_in_episode(self, steps: int, envs: np.ndarray | None, floor: int) -> tuple[Numbers, Mask]:
        """Return the starts so many steps before the open timesteps, and which are of this episode and still there."""
        starts = self.starts_before(steps, envs)
        if envs is not None:
            return starts, (self.ages[envs] > steps) & (starts >= floor)
        which = self.unbroken[steps]
        return starts, which if starts >= floor else which & (starts + self.range >= floor)
