"""Counters of a job, and the rows of metrics made of them. Counters never go back, whoever is restarted."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlframe.coordinator.messages import Collected, Learned
from rlframe.metrics.sums import Sums, add_up, env_means

COUNTERS = ("env_steps", "episodes", "return_sum", "length_sum")
_KEPT = 500  # points of a curve


@dataclasses.dataclass
class Accounts:
    """The counters of a job, as they are kept in the journal. But for `learner_steps` they never go back.

    What collectors say is cumulative, by (rank, incarnation): a lost or repeated answer changes nothing.

    Attributes:
        census: "rank.incarnation" -> its counters, in the order of `COUNTERS`.
        logged: "rank.incarnation" -> what its environments logged.
        learner_steps: of the parameters that are learned on: a restarted learner goes on from its checkpoint.
        granted: batches that learners were told to learn from.
        learned: of these, those that they did learn from.
        dropped: those that they said they dropped.
        lost: those that were out with a learner, or a coordinator, that died.
        updates: sets of priorities (or of keys alone) that came back: one for each batch that was learned from.
        learns: answers of learners that told of at least one batch.
        discarded: open fragments of collectors that were lost: one of each of their environments.
    """

    census: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    logged: dict[str, Sums] = dataclasses.field(default_factory=dict)
    learner_steps: int = 0
    params_version: int = -1
    granted: int = 0
    learned: int = 0
    dropped: int = 0
    lost: int = 0
    updates: int = 0
    learns: int = 0
    discarded: int = 0
    stale: int = 0  # answers to calls that were not waited for
    retries: int = 0  # of tasks
    restarts: int = 0  # of workers
    coordinator_restarts: int = 0
    logs: dict[str, float] = dataclasses.field(default_factory=dict)
    returns: list[list[float]] = dataclasses.field(default_factory=list)  # [env_steps, mean return] of each row
    evaluations: list[list[float]] = dataclasses.field(default_factory=list)  # [env_steps, mean return, version]

    def __post_init__(self) -> None:
        self._summed: dict[str, list[float]] | None = None  # the census that `_env_steps` is of
        self._env_steps = 0.0

    @property
    def totals(self) -> dict[str, float]:
        """The counters over all that ever collected."""
        sums = [sum(values) for values in zip(*self.census.values())] or [0] * len(COUNTERS)
        return dict(zip(COUNTERS, sums))

    @property
    def env_steps(self) -> int:
        """Steps that environments took."""
        if self._summed is not self.census:  # every event asks for it: it is not summed over all each time
            self._summed, self._env_steps = self.census, sum(values[0] for values in self.census.values())
        return int(self._env_steps)

    def collect(self, reply: Collected) -> None:
        """Takes what a collector said of itself; less than it said before is an old answer."""
        who = f"{int(reply.stats['rank'])}.{int(reply.stats['incarnation'])}"
        new = [reply.stats[name] for name in COUNTERS]
        before = self.census.get(who, [0.0])[0]
        if new[0] >= before:
            self.census[who], self.logged[who] = new, reply.stats.get("logged", {})
            self._env_steps += new[0] - before

    def learn(self, reply: Learned) -> None:
        """Takes what a learner said of a grant."""
        self.reach(reply.learner_steps, reply.params_version)
        self.learned += len(reply.updates)
        self.updates += len(reply.updates)
        self.dropped += reply.dropped
        self.learns += 1
        self.logs = dict(reply.logs) or self.logs

    def reach(self, learner_steps: int, params_version: int) -> None:
        """Takes how far a learner is."""
        self.learner_steps = int(learner_steps)
        self.params_version = max(self.params_version, int(params_version))

    def note_return(self, mean: float) -> None:
        """Adds a point to the curve; of a long one every other point is let go."""
        self.returns.append([self.env_steps, mean])
        if len(self.returns) > _KEPT:
            self.returns = self.returns[::2]

    def note_evaluation(self, mean: float, version: int) -> None:
        """Adds the mean return of an evaluation."""
        self.evaluations.append([self.env_steps, mean, version])
        if len(self.evaluations) > _KEPT:
            self.evaluations = self.evaluations[::2]

    def to_json(self) -> dict[str, Any]:
        """For the journal."""
        saved = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        copies = {name: value.copy() for name, value in saved.items() if isinstance(value, (dict, list))}
        return {**saved, **copies}  # what is in them is replaced, and never changed


class MetricRows:
    """Makes rows of metrics: each is of what was done since the one before.

    Attributes:
        at: environment steps at the newest one.
    """

    def __init__(self, now: float) -> None:
        self.at, self._totals, self._began = 0, dict.fromkeys(COUNTERS, 0.0), now
        self._logged: Sums = {}

    def to_json(self) -> list[Any]:
        """For the journal: what the last row was of."""
        return [self.at, self._totals, self._logged]

    def restore(self, saved: list[Any]) -> None:
        """Takes what `to_json` gave."""
        self.at, self._totals, self._logged = saved

    def next(self, accounts: Accounts, now: float) -> dict[str, Any]:
        """The values of a row; none where nothing was done since the last one."""
        totals = accounts.totals
        new = {name: totals[name] - self._totals.get(name, 0.0) for name in totals}
        if not new["env_steps"]:
            return {}
        values: dict[str, Any] = {}
        if new["episodes"]:
            values["episode_return"] = new["return_sum"] / new["episodes"]
            values["episode_length"] = new["length_sum"] / new["episodes"]
            values["episodes"] = int(new["episodes"])
            accounts.note_return(values["episode_return"])
        logged = add_up(accounts.logged.values())
        values.update(env_means(logged, self._logged))
        values["steps_per_second"] = new["env_steps"] / max(now - self._began, 1e-9)
        values.update(accounts.logs)
        values["learner_steps"], values["params_version"] = accounts.learner_steps, accounts.params_version
        self.at, self._totals, self._began, self._logged = accounts.env_steps, totals, now, logged
        return values
