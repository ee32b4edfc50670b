"""What collectors say they did, and the rows of metrics that come of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.accounts import COUNTERS
from rlframe.coordinator.core.roster import Worker
from rlframe.coordinator.messages import Collected
from rlframe.metrics.sums import Sums, add_up, env_means

if TYPE_CHECKING:
    from rlframe.coordinator.core.machine import Machine


class Collecting:
    """Counts what was collected.

    Args:
        machine: whose collectors they are.

    Attributes:
        seconds: of collectors' calls.
        paced_seconds: of these, such as they waited: for newer parameters, or for room.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.seconds = self.paced_seconds = 0.0
        self._row_at, self._row_totals, self._row_began = 0, dict.fromkeys(COUNTERS, 0.0), machine.now
        self._row_logged: Sums = {}

    def to_json(self) -> list[Any]:
        """For the journal: what the last row was of."""
        return [self._row_at, self._row_totals, self._row_logged]

    def restore(self, saved: list[Any]) -> None:
        """Takes what `to_json` gave."""
        self._row_at, self._row_totals, self._row_logged = saved

    def collected(self, worker: Worker, reply: Collected) -> None:
        """Takes what a collector said of itself."""
        machine = self._machine
        self.note_pace(worker, reply.waits)
        machine.accounts.collect(reply)
        worker.counts = {name: reply.stats[name] for name in COUNTERS}
        worker.params_version = reply.params_version
        if machine.accounts.env_steps >= self._row_at + machine.limits.row_every:
            self.write_row()

    def note_pace(self, worker: Worker, waits: bool) -> None:
        """A collector answered: whether it could collect since it was called, or had to wait."""
        seconds, worker.waits = max(self._machine.now - worker.said_at, 0.0), waits
        self.seconds, self.paced_seconds = self.seconds + seconds, self.paced_seconds + seconds * waits

    def write_row(self) -> None:
        """Emits a row of what was done since the last one."""
        machine, accounts = self._machine, self._machine.accounts
        totals, before = accounts.totals, self._row_totals
        new = {name: totals[name] - before.get(name, 0.0) for name in totals}
        if not new["env_steps"]:
            return
        values: dict[str, Any] = {}
        if new["episodes"]:
            values["episode_return"] = new["return_sum"] / new["episodes"]
            values["episode_length"] = new["length_sum"] / new["episodes"]
            values["episodes"] = int(new["episodes"])
            accounts.note_return(values["episode_return"])
        logged = add_up(accounts.logged.values())
        values.update(env_means(logged, self._row_logged))
        values["steps_per_second"] = new["env_steps"] / max(machine.now - self._row_began, 1e-9)
        values.update(accounts.logs)
        values["learner_steps"], values["params_version"] = accounts.learner_steps, accounts.params_version
        values["collectors"] = len([worker for worker in machine.roster.of("collector") if worker.task_id])
        self._row_at, self._row_totals, self._row_began = accounts.env_steps, totals, machine.now
        self._row_logged = logged
        machine.emit(ev.Row(accounts.env_steps, values))
