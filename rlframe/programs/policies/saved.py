"""The policy in a run's checkpoints: read by evaluations, which wait until the policy to evaluate is saved."""

from __future__ import annotations

import contextlib
import logging
import math
import pathlib
import threading
import time
from typing import Any

import jax

from rlframe import handles
from rlframe.agents import Agent
from rlframe.errors import CheckpointError, StoppedError
from rlframe.learners import Checkpointer
from rlframe.params.packing import PackedParams
from rlframe.params.publication import LocalParams
from rlframe.programs.run_dir.directory import RunDir

_log = logging.getLogger(__name__)

NEVER_SYNC = 2**62  # calls after which an Inferencer takes newer parameters: it keeps its version

_LOOK_EVERY = 0.1  # seconds between two looks at the directory
_ASK_EVERY = 5.0  # seconds between two requests: a learner that was restarted has forgotten the first
_SAVE_WITHIN = 120.0  # seconds: the disk may be full


def read_policy(agent: Agent, directory: RunDir, checkpoint: int | None = None) -> LocalParams:
    """Read the parameters for acting from a run's checkpoint. Nothing is written: the run may be active.

    Args:
        agent: of the run.
        directory: of the run.
        checkpoint: by its name; None: the newest one.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    params = agent.initial_params(jax.random.PRNGKey(0))
    template = params, agent.initial_learner_state(params)
    with contextlib.closing(Checkpointer(directory.checkpoints)) as checkpointer:
        (params, learner_state), saved, _ = checkpointer.restore(template, checkpoint)
    found = LocalParams()
    found.publish(saved["counters"]["version"], PackedParams.of(agent.actor_params(params, learner_state)))
    return found


def wait_until_saved(learner: Any, checkpoints: pathlib.Path, stop: threading.Event) -> None:
    """Ask a learner to save the policy that it has now, and wait for the checkpoint. Warn if it does not come in time.

    Args:
        learner: a Learner, or what `handles.resolve` gave for one.
        checkpoints: the directory of its checkpoints.
        stop: ends the wait.

    Raises:
        StoppedError: `stop` was set first.
        PeerError: the learner does not answer.
    """
    ask_to_save, checkpointer = handles.Poller(learner, "save_soon"), Checkpointer(checkpoints)
    wanted, asked_at, until = math.inf, -math.inf, time.monotonic() + _SAVE_WITHIN
    while True:
        wanted = min(wanted, learner.stats()["learner_steps"])  # fewer than before: it went back to a checkpoint
        steps, now = checkpointer.steps(), time.monotonic()
        if steps and steps[-1] >= wanted:
            return
        if now > until:
            _log.warning("An evaluation is logged before its checkpoint: none was written in %g s.", _SAVE_WITHIN)
            return
        if now > asked_at + _ASK_EVERY:
            asked_at = now
            ask_to_save()
        if stop.wait(_LOOK_EVERY):
            raise StoppedError("Told to stop before the policy to evaluate was saved.")


class SavedPolicy(LocalParams):
    """Parameters of the newest checkpoint, for evaluations: the evaluated policy is in a checkpoint.

    Args:
        agent: the run's.
        directory: of the run.
        learner: whose checkpoints they are: a Learner, or what `handles.resolve` gave for one.
    """

    def __init__(self, agent: Agent, directory: RunDir, learner: Any) -> None:
        super().__init__()
        self._agent, self._directory, self._learner = agent, directory, learner

    def update(self, stop: threading.Event) -> None:
        """Ask the learner for a checkpoint, wait for it and take its parameters.

        If it cannot save (the disk is full, say), take the newest parameters from the learner itself.

        Raises:
            StoppedError: `stop` was set first.
            PeerError: the learner does not answer.
        """
        wait_until_saved(self._learner, self._directory.checkpoints, stop)
        newest = self._read() or self._learner
        self.publish(*newest.get_packed(-1))  # a learner has one from its start

    def _read(self) -> LocalParams | None:
        """Return the newest checkpoint's; None if there is none that can be read."""
        checkpointer = Checkpointer(self._directory.checkpoints)
        while steps := checkpointer.steps():
            try:
                return read_policy(self._agent, self._directory, steps[-1])
            except CheckpointError as error:
                if checkpointer.steps()[-1:] == steps[-1:]:  # else a newer one has replaced it
                    _log.warning("The newest checkpoint cannot be evaluated. %s", error)
                    return None
        return None
