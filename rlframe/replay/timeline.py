"""Number the timesteps in a ring of slots that all writers share, and track the open fragments of each writer.

Each timestep gets a number when it is allocated. The timestep stays in the slot `number % slots` until the ring wraps
around to this slot. Example with 100 slots, two environments and an n-step of 3:

    number  identifies a timestep: 412 and 413 are the newest timesteps of the two environments
    slot    the timestep's row in the arrays: 12 and 13 (`slots_of`)
    block   the consecutive numbers of one batch, identified by the first number: 412
    index   the slots of a block, as an array index: `index(412, 2)` is slice(12, 14)
    floor   the lowest number that is not evicted: 314
    start   the number of an item's first timestep: 406. Tables and keys identify an item by its start
    span    an item's end minus its start: 412 - 406 = 6, for three steps of two environments
    origin  the index of the (rank, incarnation) that wrote a slot

A batch gets consecutive numbers, so large arrays are always written with one copy, for any set of environments. A
timestep's number plus the span of its step is the number of the environment's next timestep.
"""

from __future__ import annotations

from typing import Any, Union

import numpy as np

from rlframe.types import global_env_ids

Index = Union[slice, np.ndarray]
Numbers = Union[int, np.ndarray]  # the first number of a block, or one number for each environment
Mask = Union[bool, np.ndarray]  # [B] bool selects environments; True selects all, False selects none
_NONE = 255  # differs from all step types


def ring_index(first: int, count: int, size: int, base: int = 0) -> Index:
    """Return the positions of the `count` numbers from `first` on in a ring that has `size` positions.

    The ring begins at the position `base`. The result is a slice if the positions do not wrap around.
    """
    low = first % size
    return slice(base + low, base + low + count) if low + count <= size else base + (low + np.arange(count)) % size


def numbers_of(block: int, count: int, mask: Mask = True) -> np.ndarray:
    """Return the numbers of a block that `mask` selects."""
    return np.arange(block, block + count) if isinstance(mask, bool) else block + mask.nonzero()[0]


class Timeline:
    """Allocates timestep numbers and maps them to slots.

    `chunk` timesteps are evicted at once. A search for evicted items at every call would take more time than the write.
    """

    def __init__(self, slots: int, chunk: int):
        self.slots, self.chunk = slots, chunk
        self.head = 0  # the next number
        self.floor = 0  # the lowest number that is not evicted

    def raise_floor(self, count: int) -> list[Index]:
        """Increase the floor to make room for a block of `count` timesteps. Return the slots that are evicted."""
        floor, self.floor = self.floor, self.head + count - self.slots + self.chunk
        low, high = floor % self.slots, self.floor % self.slots
        if low < high:
            return [slice(low, high)]
        return [slice(low, self.slots), slice(0, high)]

    def floor_after_allocating(self, count: int) -> int:
        """Return the lowest number that remains if `count` more timesteps are allocated."""
        return max(0, self.head + count + self.chunk - self.slots)

    def index(self, numbers: Numbers, count: int) -> Index:
        """Return the slots of a block of `count` numbers, or of an array of numbers.

        A block's slots are a slice, or an array if the block wraps around the end of the ring.
        """
        if isinstance(numbers, int):
            low = numbers % self.slots
            if low + count <= self.slots:  # the usual case: the block does not wrap around
                return slice(low, low + count)
            numbers = numbers_of(numbers, count)
        return self.slots_of(numbers)

    def slots_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the slots of `numbers`."""
        return numbers % self.slots

    def follow(self, slots: np.ndarray, spans: Numbers) -> np.ndarray:
        """Return the slots that are `spans` numbers after `slots`. Use them with `take(mode="wrap")`."""
        return slots + spans

    def is_evicted(self, numbers: Numbers) -> Any:
        """Return a bool for each of the `numbers`: True if it is evicted."""
        return numbers < self.floor

    def holds(self, numbers: np.ndarray) -> np.ndarray:
        """Return a mask [B] bool that is True for the `numbers` (any integers) that are in the ring."""
        return (numbers >= self.floor) & (numbers < self.head)

    def numbers_in(self, slots: np.ndarray) -> np.ndarray:
        """Return the numbers of the timesteps that are in `slots` now."""
        numbers = slots + (self.head - self.head % self.slots)
        return np.where(numbers >= self.head, numbers - self.slots, numbers)

    def used(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows that were written, from an array that has one row per slot."""
        return rows[: self.head]


class WriterFragments:
    """The open fragments of one rank's environments.

    A fragment is a sequence of consecutive timesteps of one environment. Its last timestep is called open, because the
    next step begins there. An item can start at every `period`-th step of a fragment. The n-th start of a fragment
    (n = 0, 1, ...) is stored in row `n % history` of `starts`.

    A writer is in lockstep if each of its batches contains all its environments in order. Then its open timesteps are
    one block, and one integer describes all environments. `enter_lockstep` and `leave_lockstep` convert between the two
    forms. The example at the top of this file, after 6 steps from number 400 on, with period 1 and history 3:

        value                            in lockstep                      otherwise, for each environment
        open timesteps                   open_block = 412                 open = [412, 413]
        step types of these timesteps    type_bytes: MID MID              types = [MID, MID]
        steps since the fragment began   position = 6                     positions = [6, 6]
        newest starts                    start_blocks = [406, 408, 410]   starts = [[406, 407], [408, 409], [410, 411]]
        steps in the same episode        unbroken = [True, True, True]    ages = [3, 3]

    `unbroken[k]` is a `Mask` of the environments that acted in each of the last k + 1 steps. (An environment does not
    act in a step that begins at LAST.) These environments have an age above k. An age is at most `history`. Outside
    lockstep, `open_block` is -1.

    `record_starts` and `record_acting` record a step. `starts_before` and `starts_in_episode` support both forms. Their
    argument `envs` is an array [B], or None in lockstep, where it means all environments.
    """

    def __init__(self, rank: int, incarnation: int, num_envs: int, period: int, history: int):
        self.rank, self.incarnation, self.num_envs = rank, incarnation, num_envs
        self.period, self.history = period, history
        self.id_bytes = global_env_ids(rank, np.arange(num_envs)).tobytes()
        self.range = np.arange(num_envs)
        self.checked = False  # True if a step of the writer was already compared with the spec
        self.margin = 0  # the next `add` may overwrite the open block if it is below head + margin
        self.origin = 0  # index of (rank, incarnation) in the buffer's table
        # In lockstep:
        self.open_block = -1
        self.type_bytes = b""
        self.position = 0
        self.start_blocks = [-1] * history
        self.unbroken: list[Mask] = [True] * history
        # Outside lockstep:
        self.open = np.full(num_envs, -1, np.int64)
        self.types = np.full(num_envs, _NONE, np.uint8)
        self.positions = np.zeros(num_envs, np.int64)
        self.starts = np.full((history, num_envs), -1, np.int64)
        self.ages = np.zeros(num_envs, np.int64)

    def leave_lockstep(self) -> None:
        """Convert to the form that has one number for each environment."""
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
        """Leave lockstep, and return the arrays that a checkpoint must contain. Call `enter_lockstep` afterwards."""
        self.leave_lockstep()
        names = ("open", "types", "positions", "starts", "ages")
        return {name: getattr(self, name) for name in names}

    def enter_lockstep(self) -> None:
        """Convert to the lockstep form if the open timesteps of all environments are adjacent."""
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

    def record_starts(self, numbers: Any, envs: np.ndarray | None) -> None:
        """Record the open timesteps `numbers` of `envs` as starts if their positions are multiples of the period."""
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
        """Return the starts that are `steps` steps before the open timesteps.

        Where the mask `have_start_before` is False, the result is arbitrary.
        """
        if envs is None:
            return self.start_blocks[(self.position - steps) // self.period % self.history]
        return self.starts[(self.positions[envs] - steps) // self.period % self.history, envs]

    def have_start_before(self, steps: int, envs: np.ndarray | None) -> Mask:
        """Return a mask of `envs` that is True if a start exists exactly `steps` steps before the open timestep."""
        position = (self.position if envs is None else self.positions[envs]) - steps
        return (position >= 0) & (position % self.period == 0)

    def record_acting(self, acting: Mask, envs: np.ndarray | None) -> None:
        """Record a step of `envs`. `acting` is True for environments whose step does not begin at LAST."""
        if envs is None:
            older = self.unbroken[:-1]
            self.unbroken = [acting, *(older if acting is True else [acting & each for each in older])]
        else:
            self.ages[envs] = np.where(acting, np.minimum(self.ages[envs] + 1, self.history), 0)

    def starts_in_episode(self, steps: int, envs: np.ndarray | None, floor: int) -> tuple[Numbers, Mask]:
        """Return (starts, mask). The starts are `steps` steps before the open timesteps.

        The mask is True for starts that are in the current episode and not evicted.
        """
        starts = self.starts_before(steps, envs)
        if envs is not None:
            return starts, (self.ages[envs] > steps) & (starts >= floor)
        which = self.unbroken[steps]
        return starts, which if starts >= floor else which & (starts + self.range >= floor)
