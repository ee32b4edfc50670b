"""The monitor of programs that learn from games. It counts and limits the environment steps of the actors."""

from __future__ import annotations

import contextlib
import logging
import math
from typing import Any

from rlframe import handles
from rlframe.errors import PeerError
from rlframe.learners.saving import BestCheckpoint
from rlframe.programs.policies.evaluation import EvaluationOutcome, Evaluations
from rlframe.programs.policies.saved import SavedPolicy
from rlframe.programs.run_dir.directory import Result
from rlframe.programs.session import Session
from rlframe.programs.training.monitor import Monitor
from rlframe.programs.training.updates import min_updates, total_learner_steps, warn_if_no_updates
from rlframe.types import Logs

_log = logging.getLogger(__name__)

_CLOSE_TIMEOUT = 15.0  # maximum seconds to wait for an actor to close its environments


class GameMonitor(Monitor):
    """A monitor that counts and limits the steps of the actors, and evaluates the policy in separate environments.

    Args:
        session: The session.
        learner: A Learner, or a handle to one.
        actors: The Actors, or handles to them.
    """

    def __init__(self, session: Session, learner: Any, actors: list[Any]) -> None:
        super().__init__(session, learner)
        self._actors = [_LimitedActor(actor) for actor in actors]
        self._closing_actors = [
            handles.resolve(actor, "actor", deadline=_CLOSE_TIMEOUT, stop=self._stop) for actor in actors
        ]
        self._saved = SavedPolicy(session.agent, session.directory, self._learner)
        best = BestCheckpoint(session.directory.checkpoints)
        self._evaluations = Evaluations(self._experiment, session.agent, self._saved, best=best)

    @property
    def step(self) -> int:
        """Total number of environment steps of all actors."""
        return self._progress.counts.env_steps

    def stop(self) -> None:
        """See `Monitor`."""
        super().stop()
        self._evaluations.stop()

    def _warn_about_missing_updates(self) -> None:
        made, num_envs = self._learner_stats["learner_steps"], self._experiment.num_envs
        spec = self._session.agent.replay_spec
        warn_if_no_updates(spec, made, self.step, num_envs)
        if spec.samples_per_insert is not None and 0 < made < min_updates(spec, self.step, num_envs):
            _log.warning(
                "The learner made %d updates, but about %d were expected for %d environment steps. The learner was "
                "restored from an older checkpoint, or the replay lost items.",
                made,
                total_learner_steps(spec, self.step, num_envs),
                self.step,
            )

    def _is_done(self) -> bool:
        return self.step >= self._session.until

    def _poll_nodes(self) -> None:
        self._allow_steps(math.ceil(max(0, self._session.until - self.step) / len(self._actors)))
        self._learner_stats = self._poll_learner() or self._learner_stats

    def _pause_actors(self) -> None:
        self._allow_steps(0)

    def _allow_steps(self, share: int) -> None:
        for actor in self._actors:
            if (stats := actor.allow(share)) is not None:
                self._progress.counts.add(stats)

    def _evaluate(self, *, final: bool) -> Logs:
        self._saved.update(self._stop)
        return self._evaluations.evaluate(self._end_actors if final else None)

    def _end_actors(self) -> None:
        """Stop the actors, and close their environments."""
        for actor in self._closing_actors:
            with contextlib.suppress(PeerError):
                actor.stop_and_close()

    def _result(self, evaluation: EvaluationOutcome, stopped_by: str) -> Result:
        return self._rows.result(self.step, self._learner_stats, evaluation, stopped_by)


class _LimitedActor:
    """An actor that stops at a limit of environment steps, even if the monitor dies. The monitor raises the limit.

    Args:
        actor: An Actor, or a handle to one.
    """

    def __init__(self, actor: Any) -> None:
        self._poll_allow = handles.Poller(handles.resolve(actor, "actor"), "allow")
        self._incarnation, self._env_steps = -1, 0.0  # from the actor's newest stats

    def allow(self, share: int) -> dict[str, Any] | None:
        """Set the limit to the reported steps plus `share`. Return the stats, or None if the actor has not answered."""
        stats = self._poll_allow(self._incarnation, self._env_steps + share)
        if stats is not None:
            self._incarnation, self._env_steps = stats["incarnation"], stats["env_steps"]
        return stats
