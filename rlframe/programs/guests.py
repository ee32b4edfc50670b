"""Guests: programs on other machines that join a run, and the monitor's registry of them.

They call, and are never called, so a firewall or NAT on their side is in nobody's way.
"""

from __future__ import annotations

import dataclasses
import platform
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import rlframe
from rlframe.errors import UnavailableError, UsageError
from rlframe.programs import naming

if TYPE_CHECKING:
    from rlframe.agents import Agent
    from rlframe.programs.experiment import Experiment
    from rlframe.programs.run import Run

# The groups that other machines call. Of a run with `--listen PORT` these have the ports PORT, PORT + 1, PORT + 2.
OPEN_GROUPS = ("monitor", "learner", "replay")

ATTEND_EVERY = 0.5  # seconds between two calls of a guest
_SETTLE = 3.0  # seconds in which a monitor that was restarted hears of the guests that there are
_STARTS_WITHIN = 120.0  # seconds that a guest's processes have from its admission to the first call
_LAPSES_AFTER = 15.0  # seconds of silence after which a guest's ranks are free


@dataclasses.dataclass(frozen=True)
class GuestParts:
    """What actors on another machine are made of. Crosses as a pickle, with the classes of a user's own files."""

    experiment: Experiment
    agent: Agent
    actor_seed: int  # as that of the run's own actors: another one in each session
    env: Any  # a name or a function, as `SyncEnv` takes it


@dataclasses.dataclass
class _Guest:
    ranks: list[int]
    until: float  # monotonic time at which its ranks are free, unless it is heard again
    has_called: bool = False


# rank -> (incarnation, environment steps at which it waits): what `Actor.allow` takes, for each of a guest's actors.
StepLimits = dict[int, tuple[int, float]]


class GuestRegistry:
    """Hands out ranks to guests (programs that join), and takes in what their actors have done.

    Every method may be called from any thread, and any call may be repeated.

    Args:
        run: the session that may be joined.
        settles: whether there was a registry before, whose guests must be heard before others come in.
    """

    def __init__(self, run: Run, *, settles: bool = False) -> None:
        self._run = run
        self._opens_at = time.monotonic() + (_SETTLE if settles else 0.0)
        self._changed = threading.Condition()
        self._guests: dict[str, _Guest] = {}
        self._stats: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._over = False
        self._known: StepLimits = {}  # how far actors were, as the monitor heard last
        self._limits: StepLimits = {}

    @property
    def num_actors(self) -> int:
        """Actors of the guests that are alive."""
        with self._changed:
            return len(self._held())

    def admit(self, token: str, num_actors: int, versions: dict[str, str]) -> dict[str, Any]:
        """Gives a guest the lowest ranks that are free, and what its actors are made of.

        Args:
            token: names the guest; one that asks again is given the same.
            num_actors: how many ranks it needs.
            versions: what `installed()` gives there.

        Returns:
            `ranks`, `session`, and `parts`: the pickle of a `GuestParts`.

        Raises:
            UsageError: the run cannot be joined, or not with these versions.
            UnavailableError: not yet.
        """
        import cloudpickle

        if self._run.listen is None:
            raise UsageError("This run was started without --listen: other machines cannot join it.")
        if versions != (here := installed()):
            raise UsageError(
                f"The run is of {_listed(here)}; the machine that would join it has {_listed(versions)}. "
                "Install the same on both: what they exchange is pickled."
            )
        with self._changed:
            if self._over:
                raise UsageError("The run is over: nothing can join it any more.")
            if token not in self._guests:
                if time.monotonic() < self._opens_at:
                    raise UnavailableError("The run's monitor was restarted, and hears of its guests first.")
                self._guests[token] = _Guest(self._free_ranks(num_actors), time.monotonic() + _STARTS_WITHIN)
            ranks = self._guests[token].ranks
        run = self._run
        env = naming.env_name_or_builder(run.experiment.env)
        parts = GuestParts(run.experiment, run.agent, run.actor_seed, env)
        return {"ranks": ranks, "session": run.session, "parts": cloudpickle.dumps(parts)}

    def attend(self, token: str, session: str, ranks: list[int], stats: list[dict[str, Any]]) -> StepLimits | None:
        """Notes that a guest is alive and what its actors say of themselves. Returns how far they may go.

        Returns None where the run is over.

        Raises:
            UsageError: the guest was silent for so long that its ranks were given to another, or it was admitted to
                another session, whose steps are counted already.
        """
        if session != self._run.session:
            raise UsageError("The run that this program joined was ended, and started or resumed since: join again.")
        with self._changed:
            guest = self._guests.get(token)
            if guest is None:  # a monitor was restarted, or the guest's time had lapsed
                if taken := set(ranks) & self._held():
                    raise UsageError(f"The ranks {sorted(taken)} were given to another program meanwhile: join again.")
                guest = self._guests[token] = _Guest(list(ranks), 0.0)
            guest.until, guest.has_called = time.monotonic() + _LAPSES_AFTER, True
            for each in stats:
                self._stats.put(each)
            return None if self._over else {rank: self._limits[rank] for rank in ranks if rank in self._limits}

    def leave(self, token: str) -> None:
        """Frees a guest's ranks."""
        with self._changed:
            self._guests.pop(token, None)
            self._changed.notify_all()

    def heard(self) -> list[dict[str, Any]]:
        """What guests' actors said of themselves since the last call, as `Actor.stats` gives it."""
        found = [self._stats.get() for _ in range(self._stats.qsize())]
        self._known.update({stats["rank"]: (stats["incarnation"], stats["env_steps"]) for stats in found})
        return found

    def lead(self, share: int) -> None:
        """Lets each actor of a guest take so many steps beyond those that were heard of."""
        self._limits = {rank: (incarnation, steps + share) for rank, (incarnation, steps) in self._known.items()}

    def end(self) -> None:
        """Tells all guests, when they call next, that the run is over."""
        self._over = True

    def wait_until_left(self, seconds: float) -> None:
        """Waits, at most so long, until all guests that live have left."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held(only_who_called=True), seconds)

    def _free_ranks(self, count: int) -> list[int]:
        held, ranks = self._held(), list[int]()
        rank = self._run.topology.num_actors
        while len(ranks) < count:
            if rank not in held:
                ranks.append(rank)
            rank += 1
        return ranks

    def _held(self, only_who_called: bool = False) -> set[int]:
        """The ranks of guests that are alive; forgets the others."""
        now = time.monotonic()
        self._guests = {token: guest for token, guest in self._guests.items() if guest.until > now}
        guests = [guest for guest in self._guests.values() if guest.has_called or not only_who_called]
        return {rank for guest in guests for rank in guest.ranks}


def installed() -> dict[str, str]:
    """What two machines must have in common."""
    return {"rlframe": rlframe.__version__, "Python": ".".join(platform.python_version_tuple()[:2])}


def _listed(versions: dict[str, str]) -> str:
    return " on ".join(f"{name} {version}" for name, version in versions.items())
