"""What a run has saved, where a Learner is expected. Nothing is written: the run may be alive."""

from __future__ import annotations

import time

import jax

from rlframe.agents import Agent
from rlframe.errors import CheckpointError, PeerError
from rlframe.learners.checkpoints import Checkpointer
from rlframe.params.packing import PackedParams
from rlframe.params.source import NewestParams
from rlframe.programs.run_dir import RunDir
from rlframe.types import Tree

_LOOK = 1.0  # seconds between two looks at the directory


def restored(agent: Agent, directory: RunDir, checkpoint: int | None = None) -> NewestParams:
    """Read the parameters for acting from a run's checkpoint.

    Args:
        agent: of the run.
        directory: of the run.
        checkpoint: by its name; None: the newest one at the time.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    params = agent.initial_params(jax.random.PRNGKey(0))
    checkpointer = Checkpointer(directory.checkpoints)
    try:
        (params, learner_state), saved = checkpointer.restore((params, agent.initial_learner_state(params)), checkpoint)
    finally:
        checkpointer.close()
    found = NewestParams()
    found.put(saved["counters"]["version"], PackedParams.of(agent.actor_params(params, learner_state)))
    return found


class Checkpoints:
    """A run's newest checkpoint, whenever it is asked for. Its version is that of the parameters saved."""

    def __init__(self, agent: Agent, directory: RunDir) -> None:
        self._agent, self._directory = agent, directory
        self._steps: list[int] | None = None  # of the checkpoints that there were
        self._newest: NewestParams | None = None
        self._looked = 0.0

    def get_params(self, known_version: int = -1) -> tuple[int, Tree | None]:
        """As `Learner.get_params`.

        Raises:
            PeerError: the newest one cannot be read, or there is none yet.
        """
        now = time.monotonic()
        if self._newest is None or now > self._looked + _LOOK:
            self._looked = now
            steps = Checkpointer(self._directory.checkpoints).steps()
            if self._newest is None or (steps and steps != self._steps):
                try:
                    self._newest = restored(self._agent, self._directory)
                except CheckpointError as error:
                    raise PeerError(str(error)) from error
                self._steps = steps
        return self._newest.get_params(known_version)
