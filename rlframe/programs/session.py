"""A session of a run: values that all nodes need, schedules of recurring tasks, and the decision to stop early."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import time
from typing import TYPE_CHECKING

from rlframe import handles
from rlframe.agents import Agent
from rlframe.envs.adapters import env_seed
from rlframe.envs.codec import Codec
from rlframe.metrics import Logger, ProgressDisplay
from rlframe.programs.experiment import Experiment
from rlframe.programs.run_dir.directory import RunDir
from rlframe.programs.topologies.config import EnvOptions, TopologyConfig

if TYPE_CHECKING:
    from rlframe.device.seeds import JointSeeds
    from rlframe.engines.stopping import StopSignal
    from rlframe.programs.training.profile import Profile


@dataclasses.dataclass(frozen=True)
class Shared:
    """The objects that connect a run with the runs of other seeds in this process; see `seed_runs.py`."""

    group: JointSeeds
    stop: StopSignal  # receives the signals of the main thread


@dataclasses.dataclass(frozen=True)
class Session:
    """The values that the nodes of a session share: experiment, agent, run directory, last step and others.

    A run starts with one session. Each resume adds another session.
    """

    experiment: Experiment
    agent: Agent
    path: pathlib.Path  # the run directory
    until: int  # the step at which this session ends
    began: float  # start time, in seconds since the epoch
    # Environment steps of earlier sessions, from `progress.json`. 0 in a single process, whose checkpoints count them.
    steps_before: int = 0
    quiet: bool = False  # print nothing
    codec: Codec | None = None  # codec of the environments; None for a language model
    # `loggers` and `progress` are set only if all nodes are in one process. Otherwise the launcher writes the rows.
    loggers: tuple[Logger, ...] = ()  # loggers that receive each row
    progress: ProgressDisplay | None = None  # gets each row, and the current step a few times a second
    profile: Profile | None = None  # measures the time of each part of a single process
    shared: Shared | None = None  # set if the runs of several seeds are in this process

    @property
    def directory(self) -> RunDir:
        """The run directory."""
        return RunDir(self.path)

    @property
    def topology_config(self) -> TopologyConfig:
        """The options of the topology."""
        return self.experiment.topology_config

    @property
    def last_step_reason(self) -> str:
        """The value of `Result.stopped_by` if the session reaches its last step."""
        return "steps" if self.until >= self.experiment.steps else "stop_at"

    def show(self, activity: str) -> None:
        """Show in the progress display what the run does before its first update."""
        if self.progress is not None:
            self.progress.show(activity)

    @property
    def actor_seed(self) -> int:
        """The seed of the actors. Each session has a different seed, because incarnation numbers start again at 0."""
        seed = self.experiment.seed
        return env_seed(seed, self.steps_before) if self.steps_before else seed

    @property
    def budget(self) -> int:
        """The limit of environment steps for each actor at the start. The monitor can raise this limit."""
        return math.ceil((self.until - self.steps_before) / EnvOptions.of(self.experiment).num_actors)

    @property
    def session_id(self) -> str:
        """Unique ID of the session within the run."""
        return f"{self.began!r}"

    @property
    def peer_deadline(self) -> float:
        """Maximum seconds that a node waits for another node. Infinite if the launcher restarts nodes that hang."""
        return math.inf if self.topology_config.kills_hung_nodes else handles.DEADLINE


class Schedule:
    """A schedule for a task that is due at every multiple of `every` steps.

    Args:
        every: Number of steps between two steps at which the task is due. 0 means that the task is never due.
        after: The current step. The task is due only at later steps.

    Attributes:
        due: The next step at which the task is due.
    """

    def __init__(self, every: int, after: int) -> None:
        self._every = every
        self.due = self._next_after(after)

    def advance_to(self, step: int) -> bool:
        """Return True if the task is due at `step`. In this case, set `due` to a later step."""
        if step < self.due:
            return False
        self.due = self._next_after(step)
        return True

    def _next_after(self, step: int) -> float:
        return (step // self._every + 1) * self._every if self._every else math.inf


class EarlyStop:
    """The decision to end a session before its last step, because of a callback or a limit such as `until_return`.

    Args:
        session: The session.
        by: If this process was restarted after the decision to stop early: the reason. Otherwise None.

    Attributes:
        by: The reason, for `Result.stopped_by`. None means no early stop yet.
        evaluates: True if the final policy is evaluated.
    """

    def __init__(self, session: Session, by: str | None = None) -> None:
        self._limits, self._began = session.topology_config.stop_conditions, session.began
        self._has_limits = self._limits.has_limits
        self.by, self.evaluates = by, True

    def request(self, by: str, evaluate: bool = True) -> None:
        """End the session after the current step.

        If there are several requests, keep the reason of the first, or of the last with `evaluate=False`.

        Args:
            by: Name of the reason.
            evaluate: True if the final policy must be evaluated.
        """
        if not evaluate:
            self.by, self.evaluates = by, False
        self.by = self.by or by

    def check_limits(self, learner_steps: int, eval_return: float | None) -> str | None:
        """Set `by` if a limit is reached. Return `by`: the reason to stop now, or None.

        Args:
            learner_steps: Learner steps so far.
            eval_return: Mean return of the newest evaluation. None means no evaluation yet.
        """
        if self.by is None and self._has_limits:
            seconds = time.time() - self._began
            reason = self._limits.reached(learner_steps=learner_steps, seconds=seconds, eval_return=eval_return)
            if reason is not None:
                self.by = self.by or reason.by  # another thread can have called `request`
        return self.by
