"""One session of a run, as the nodes of its program need to know it."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import TYPE_CHECKING, Any

from rlframe import handles
from rlframe.actors.actor import env_seed
from rlframe.agents import Agent
from rlframe.coordinator.stop_conditions import StopConditions
from rlframe.envs.codec import Codec
from rlframe.metrics import Logger
from rlframe.programs.experiment import Experiment
from rlframe.programs.run_dir import RunDir

if TYPE_CHECKING:
    from rlframe.programs.profile import Profile


@dataclasses.dataclass(frozen=True)
class Run:
    """A session: what is run, from where to where."""

    experiment: Experiment
    agent: Agent
    path: pathlib.Path  # of the run directory
    until: int  # the step at which this session ends
    began: float  # seconds since the epoch
    resumes: bool = False  # goes on with what is in the directory
    resumed_at: int = 0  # environment steps of the sessions before
    quiet: bool = False  # prints nothing
    # Of a single process:
    loggers: tuple[Logger, ...] = ()  # they are told of each row as it is written
    progress: Logger | None = None  # the same, and without values, a few times a second
    profile: Profile | None = None
    codec: Codec | None = None  # of the environments; None where there are none

    @property
    def directory(self) -> RunDir:
        """The run directory."""
        return RunDir(self.path)

    @property
    def topology(self) -> Any:
        """What the topology was told."""
        return self.experiment.topology

    @property
    def stop_conditions(self) -> StopConditions:
        """The limits that may end the session before its last step; a language model has none."""
        limits = (getattr(self.topology, f"until_{name}", None) for name in ("learner_steps", "seconds", "return"))
        return StopConditions(None, *limits)

    @property
    def last_step_is(self) -> str:
        """What the session's last step is, as `Result.stopped_by`."""
        return "steps" if self.until >= self.experiment.steps else "stop_at"

    @property
    def actor_seed(self) -> int:
        """Seed of the actors; another in each session, whose actors' incarnations begin anew."""
        seed = self.experiment.seed
        return env_seed(seed, self.resumed_at) if self.resumed_at else seed

    @property
    def budget(self) -> int:
        """Environment steps that each actor may take before the monitor has been heard."""
        return math.ceil((self.until - self.resumed_at) / self.topology.num_actors)

    @property
    def session(self) -> str:
        """Names the session among those of its run."""
        return f"{self.began!r}"

    @property
    def peer_deadline(self) -> float:
        """Seconds for which one node waits for another: for ever where none may hang for ever."""
        return math.inf if getattr(self.topology, "is_watched", False) else handles.DEADLINE
