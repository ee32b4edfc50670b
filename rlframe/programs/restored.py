"""What a run has saved, where a Learner is expected. Nothing is written: the run may be alive."""

from __future__ import annotations

import time

import jax

from rlframe.agents import Agent
from rlframe.errors import CheckpointError, PeerError
from rlframe.learners.checkpoints import Checkpointer
from rlframe.programs.run_dir import RunDir
from rlframe.types import Tree

_LOOK = 1.0  # seconds between two looks at the directory


class Restored:
    """A run's newest checkpoint at the time.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """

    def __init__(self, agent: Agent, directory: RunDir) -> None:
        params = agent.initial_params(jax.random.PRNGKey(0))
        checkpointer = Checkpointer(directory.checkpoints)
        try:
            (params, learner_state), saved = checkpointer.restore((params, agent.initial_learner_state(params)))
        finally:
            checkpointer.close()
        self._version: int = saved["counters"]["version"]
        self._published = agent.actor_params(params, learner_state)

    def get_params(self, known_version: int = -1) -> tuple[int, Tree | None]:
        """As `Learner.get_params`."""
        return self._version, None if known_version == self._version else self._published


class Checkpoints:
    """A run's newest checkpoint, whenever it is asked for. Its version is that of the parameters saved."""

    def __init__(self, agent: Agent, directory: RunDir) -> None:
        self._agent, self._directory = agent, directory
        self._newest: list[int] | None = None  # the steps that there were
        self._restored: Restored | None = None
        self._looked = 0.0

    def get_params(self, known_version: int = -1) -> tuple[int, Tree | None]:
        """As `Learner.get_params`.

        Raises:
            PeerError: the newest one cannot be read, or there is none yet.
        """
        now = time.monotonic()
        if self._restored is None or now > self._looked + _LOOK:
            self._looked = now
            steps = Checkpointer(self._directory.checkpoints).steps()
            if self._restored is None or (steps and steps != self._newest):
                try:
                    self._restored = Restored(self._agent, self._directory)
                except CheckpointError as error:
                    raise PeerError(str(error)) from error
                self._newest = steps
        return self._restored.get_params(known_version)
