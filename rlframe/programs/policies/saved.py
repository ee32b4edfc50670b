"""Read policies from the checkpoints of a run. An evaluation first waits until the policy is saved."""

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

NEVER_SYNC = 2**62  # `sync_interval` of an Inferencer that never loads newer parameters

_POLL = 0.1  # seconds between two checks of the directory
_REQUEST_EVERY = 5.0  # seconds between two requests to save, because a restarted learner has lost the earlier request
_SAVE_WITHIN = 120.0  # maximum seconds to wait for the checkpoint, because a save can fail


def read_policy(agent: Agent, directory: RunDir, checkpoint: int | None = None) -> LocalParams:
    """Read the parameters for acting from a checkpoint. Write nothing, so that the run can continue to train.

    Args:
        agent: agent of the run.
        directory: directory of the run.
        checkpoint: name of the checkpoint. None means the newest one.

    Raises:
        CheckpointError: the checkpoint does not exist or is damaged.
    """
    params = agent.initial_params(jax.random.PRNGKey(0))
    template = params, agent.initial_learner_state(params)
    with contextlib.closing(Checkpointer(directory.checkpoints)) as checkpointer:
        (params, learner_state), saved, _ = checkpointer.restore(template, checkpoint)
    found = LocalParams()
    found.publish(saved["counters"]["version"], PackedParams.of(agent.actor_params(params, learner_state)))
    return found


def wait_until_saved(learner: Any, checkpoints: pathlib.Path, stop: threading.Event) -> None:
    """Request a checkpoint of the learner's current policy, and wait for it. Log a warning if it is late.

    Args:
        learner: a Learner, or the result of `handles.resolve` for a learner.
        checkpoints: directory of the checkpoints.
        stop: event that ends the wait.

    Raises:
        StoppedError: `stop` was set before the checkpoint was written.
        PeerError: the learner does not answer.
    """
    request_save, checkpointer = handles.Poller(learner, "save_soon"), Checkpointer(checkpoints)
    wanted, requested_at, until = math.inf, -math.inf, time.monotonic() + _SAVE_WITHIN
    while True:
        # use the minimum, because a restarted learner has fewer steps
        wanted = min(wanted, learner.stats()["learner_steps"])
        steps, now = checkpointer.steps(), time.monotonic()
        if steps and steps[-1] >= wanted:
            return
        if now > until:
            _log.warning(
                "The checkpoint for an evaluation was not written within %g s. The evaluation continues without it.",
                _SAVE_WITHIN,
            )
            return
        if now > requested_at + _REQUEST_EVERY:
            requested_at = now
            request_save()
        if stop.wait(_POLL):
            raise StoppedError("Stopped before the policy to evaluate was saved.")


class SavedPolicy(LocalParams):
    """The parameters of the newest checkpoint, for evaluations. In this way, each evaluated policy is also saved.

    Args:
        agent: agent of the run.
        directory: directory of the run.
        learner: the Learner that writes the checkpoints, or the result of `handles.resolve` for it.
    """

    def __init__(self, agent: Agent, directory: RunDir, learner: Any) -> None:
        super().__init__()
        self._agent, self._directory, self._learner = agent, directory, learner

    def update(self, stop: threading.Event) -> None:
        """Request a checkpoint from the learner, wait for it, and load its parameters.

        If no checkpoint can be read (for example, because the disk was full), get the learner's newest parameters.

        Raises:
            StoppedError: `stop` was set before the checkpoint was written.
            PeerError: the learner does not answer.
        """
        wait_until_saved(self._learner, self._directory.checkpoints, stop)
        newest = self._read() or self._learner
        self.publish(*newest.get_packed(-1))  # a learner always has parameters

    def _read(self) -> LocalParams | None:
        """Return the parameters of the newest checkpoint, or None if there is no checkpoint or it cannot be read."""
        checkpointer = Checkpointer(self._directory.checkpoints)
        while steps := checkpointer.steps():
            try:
                return read_policy(self._agent, self._directory, steps[-1])
            except CheckpointError as error:
                # if there is a newer checkpoint now, read that one instead
                if checkpointer.steps()[-1:] == steps[-1:]:
                    _log.warning("The newest checkpoint cannot be evaluated. %s", error)
                    return None
        return None
