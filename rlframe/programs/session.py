"""One session of a run: what its nodes need to know, when something is due, and why it ends before its last step."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import time
from typing import TYPE_CHECKING

from rlframe import handles
from rlframe.actors.actor import env_seed
from rlframe.agents import Agent
from rlframe.envs.codec import Codec
from rlframe.metrics import Logger
from rlframe.programs.experiment import Experiment
from rlframe.programs.run_dir.directory import RunDir
from rlframe.programs.topologies.config import EnvOptions, TopologyConfig

if TYPE_CHECKING:
    from rlframe.programs.training.profile import Profile


@dataclasses.dataclass(frozen=True)
class Session:
    """The values that the nodes of a session share: the experiment, its agent, the run directory, the last step.

    A run has one session, and another one each time it is resumed.
    """

    experiment: Experiment
    agent: Agent
    path: pathlib.Path  # of the run directory
    until: int  # the step at which this session ends
    began: float  # seconds since the epoch
    # Environment steps of earlier sessions, from `progress.json`. A single process has 0: its checkpoints count them.
    steps_before: int = 0
    quiet: bool = False  # prints nothing
    codec: Codec | None = None  # of the environments; None for a language model
    # These three are only set in a single process. Of several processes, the launcher keeps the loggers.
    loggers: tuple[Logger, ...] = ()  # get each row as it is written
    progress: Logger | None = None  # gets the rows, and a few times a second the step without values
    profile: Profile | None = None  # measures where the time goes

    @property
    def directory(self) -> RunDir:
        """The run directory."""
        return RunDir(self.path)

    @property
    def topology_config(self) -> TopologyConfig:
        """The config of the topology."""
        return self.experiment.topology_config

    @property
    def last_step_reason(self) -> str:
        """The reason to stop at the session's last step, for `Result.stopped_by`."""
        return "steps" if self.until >= self.experiment.steps else "stop_at"

    @property
    def actor_seed(self) -> int:
        """Seed of the actors; another one in each session, because incarnations start again at 0."""
        seed = self.experiment.seed
        return env_seed(seed, self.steps_before) if self.steps_before else seed

    @property
    def budget(self) -> int:
        """Environment steps that each actor may take before the monitor gives it more."""
        return math.ceil((self.until - self.steps_before) / EnvOptions.of(self.experiment).num_actors)

    @property
    def session_id(self) -> str:
        """Identifies the session among those of its run."""
        return f"{self.began!r}"

    @property
    def peer_deadline(self) -> float:
        """Seconds that a node waits for another one: without limit if the launcher restarts nodes that hang."""
        return math.inf if self.topology_config.kills_hung_nodes else handles.DEADLINE


class Schedule:
    """Due at each multiple of a number of steps.

    Args:
        every: the number; 0: it is never due.
        after: the step after which it is due first.

    Attributes:
        due: the next step at which it is due.
    """

    def __init__(self, every: int, after: int) -> None:
        self._every = every
        self.due = self._next_after(after)

    def advance_to(self, step: int) -> bool:
        """Return True if a multiple is reached, and set `due` to the next one. Several that were passed count once."""
        if step < self.due:
            return False
        self.due = self._next_after(step)
        return True

    def _next_after(self, step: int) -> float:
        return (step // self._every + 1) * self._every if self._every else math.inf


class EarlyStop:
    """The decision to end a session before its last step, by a callback or a limit such as `until_return`.

    Args:
        session: the session.
        by: why, if a process that was restarted had decided it before.

    Attributes:
        by: why, as `Result.stopped_by`; None until it is decided.
        evaluates: whether the final policy is evaluated.
    """

    def __init__(self, session: Session, by: str | None = None) -> None:
        self._limits, self._began = session.topology_config.stop_conditions, session.began
        self._has_limits = self._limits.has_limits
        self.by, self.evaluates = by, True

    def request(self, by: str, evaluate: bool = True) -> None:
        """End the session after the step under way. The first reason counts, unless a later one excludes evaluating.

        Args:
            by: the reason's name.
            evaluate: evaluate the final policy.
        """
        if not evaluate:
            self.by, self.evaluates = by, False
        self.by = self.by or by

    def check_limits(self, learner_steps: int, eval_return: float | None) -> str | None:
        """Set `by` if a limit is reached, and return it: the reason to end now, or None.

        Args:
            learner_steps: so far.
            eval_return: mean return of the newest evaluation; None: there was none.
        """
        if self.by is None and self._has_limits:
            seconds = time.time() - self._began
            reason = self._limits.reached(learner_steps=learner_steps, seconds=seconds, eval_return=eval_return)
            self.by = None if reason is None else reason.by
        return self.by
