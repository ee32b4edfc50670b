"""A program that joins a run on another machine: actors, and the inference service that they share.

Parameters come and items go; observations and actions stay on this machine. Everything is called from here, at three
ports of the run's machine.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from typing import Any

from rlframe import extras, handles
from rlframe.actors import Actor
from rlframe.engines import Engine
from rlframe.errors import PeerError, StoppedError, UsageError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.programs.guests import ATTEND_EVERY, OPEN_GROUPS, GuestParts, StepLimits, installed
from rlframe.programs.session import make_engine
from rlframe.programs.topologies.parts import env_builder

_LONGER = 60.0  # seconds by which actors wait longer for the run's machine than the guest, which ends them all


class Admission:
    """A place in a run, for a program that has yet to be launched.

    Args:
        address: "host:port" where the run's monitor listens (`rlframe train --listen PORT`).
        num_actors: of the program.
        deadline: seconds that the run's machine may be out of reach, now and later.

    Raises:
        UsageError: the run cannot be joined, or has other versions of rlframe or Python.
        PeerError: nobody answered within the deadline.

    Attributes:
        addresses: of the nodes of `OPEN_GROUPS`.
        ranks: of the actors.
        parts: what they are made of.
    """

    def __init__(self, address: str, num_actors: int, deadline: float) -> None:
        import cloudpickle

        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 2**16 - len(OPEN_GROUPS):
            raise UsageError(f"A run is joined at HOST:PORT, where PORT is that of its --listen; got {address!r}.")
        if num_actors < 1:
            raise UsageError(f"num_actors must be at least 1, got {num_actors}.")
        if deadline <= 0:
            raise UsageError(f"deadline must be more than 0 s, got {deadline:g}.")
        self.deadline = deadline
        self.token = secrets.token_hex(8)
        self.addresses = {group: f"{host}:{int(port) + i}" for i, group in enumerate(OPEN_GROUPS)}
        answer = self.monitor(deadline).admit(self.token, num_actors, installed())
        self.ranks: list[int] = answer["ranks"]
        self.session: str = answer["session"]
        self.parts: GuestParts = cloudpickle.loads(answer["parts"])

    def monitor(self, deadline: float, stop: threading.Event | None = None) -> Any:
        """The run's Monitor."""
        return handles.Remote([self.addresses["monitor"]], "monitor of the run", deadline, stop)


def guests(engine: Engine, admission: Admission, num_inferencers: int) -> None:
    """The wiring: as that of `light_env`, with a learner and a replay that are elsewhere."""
    from rlframe.replay.reverb import ReverbReplayBuffer

    parts, deadline = admission.parts, admission.deadline + _LONGER
    cfg = InferencerConfig(seed=parts.experiment.seed, learner_deadline=deadline)
    learner = handles.Remote([admission.addresses["learner"]], "learner", deadline)
    replay_buffer = ReverbReplayBuffer(parts.agent, admission.addresses["replay"])
    inferencers = [engine.add("inferencer", Inferencer, cfg, parts.agent, learner) for _ in range(num_inferencers)]
    num_pools = parts.experiment.topology.num_pools
    options = {"seed": parts.actor_seed, "num_pools": num_pools, "deadline": deadline, "budget": 0}
    builder = env_builder(parts.experiment, env=parts.env)
    actors = [
        engine.add("actor", Actor, builder, inferencers, replay_buffer, rank, **options) for rank in admission.ranks
    ]
    engine.add("guest", Guest, admission, actors)


class Guest:
    """Tells the run what the actors here have done, and them how far they may go.

    `run()` returns when the run is over.

    Args:
        admission: the place in the run.
        actors: Actors, or handles to them.
    """

    def __init__(self, admission: Admission, actors: list[Any]) -> None:
        self._admission = admission
        self._stop = threading.Event()
        self._monitor = admission.monitor(admission.deadline, self._stop)
        polls = [handles.Poll(handles.resolve(actor, "actor"), "allow") for actor in actors]
        self._actors = dict(zip(admission.ranks, polls, strict=True))
        self._limits: StepLimits = {}
        self._env_steps: dict[tuple[float, float], float] = {}  # (rank, incarnation) -> steps

    def run(self) -> None:
        """Calls the run's monitor until that says that the run is over, or `stop()`.

        Raises:
            PeerError: the run's machine was out of reach for longer than the deadline.
            UsageError: it was for so long that others have the ranks of the actors here.
        """
        with handles.stopped_by_program(self.stop):
            try:
                while not self._stop.is_set() and not self._attend():
                    self._stop.wait(ATTEND_EVERY)
            except StoppedError:
                pass
            with contextlib.suppress(PeerError):
                self._admission.monitor(0.0).leave(self._admission.token)
        if not self._stop.is_set():
            print(f"The run is over. {sum(self._env_steps.values()):,.0f} environment steps were taken here.")

    def stop(self) -> None:
        """Ends `run()`. Any thread may call it."""
        self._stop.set()

    def _attend(self) -> bool:
        """Returns whether the run is over."""
        answers = [allow(*self._limits.get(rank, (-1, 0))) for rank, allow in self._actors.items()]
        said = [stats for stats in answers if stats is not None]
        self._env_steps.update({(stats["rank"], stats["incarnation"]): stats["env_steps"] for stats in said})
        admission = self._admission
        limits = self._monitor.attend(admission.token, admission.session, admission.ranks, said)
        self._limits = limits or {}
        return limits is None


def join(address: str, *, num_actors: int = 2, num_inferencers: int = 1, deadline: float = 60.0) -> int | None:
    """Adds actors on this machine to a run on another, until that is over.

    What the run's machine sends is unpickled: join only what you trust.

    Args:
        address: "host:port", where PORT is what the run was started with: `rlframe train --listen PORT`.
        num_actors: processes of environments here, each with as many as the run's own actors have.
        num_inferencers: inference services here.
        deadline: seconds that the run's machine may be out of reach.

    Returns:
        The number of the signal that ended it, or None where the run was over.

    Raises:
        UsageError: see `Admission`.
        PeerError: nobody answered at the address within the deadline.
        ProgramError: a node here failed more often than it may, or the run's machine was out of reach for too long.
    """
    extras.require("rlframe join", "launchpad", "reverb")
    if num_inferencers < 1:
        raise UsageError(f"num_inferencers must be at least 1, got {num_inferencers}.")
    admission = Admission(address, num_actors, deadline)
    engine = make_engine(admission.parts.experiment, logs=None)
    guests(engine, admission, num_inferencers)
    return engine.run()
