"""Read policies from the checkpoints of a run. An evaluation first waits until the policy is saved."""

from __future__ import annotations

import contextlib
import logging
import math
import pathlib
import threading
import time
from typing import Any, Literal, Union

from rlframe import handles
from rlframe.agents import Agent
from rlframe.errors import CheckpointError, StoppedError, UsageError
from rlframe.learners import Checkpointer
from rlframe.learners.best import BestCheckpoint
from rlframe.learners.checkpoints import SavedCheckpoint
from rlframe.learners.initial_state import InitialState
from rlframe.params.packing import PackedParams
from rlframe.params.publication import LocalParams
from rlframe.programs.run_dir.directory import RunDir

_log = logging.getLogger(__name__)

Checkpoint = Union[int, Literal["best"], None]  # name of a checkpoint, the best one, or the newest one

NEVER_SYNC = 2**62  # `sync_interval` of an Inferencer that never loads newer parameters

_POLL = 0.1  # seconds between two checks of the directory
_REQUEST_EVERY = 5.0  # seconds between two requests to save, because a restarted learner has lost the earlier request
_SAVE_WITHIN = 120.0  # maximum seconds to wait for the checkpoint, because a save can fail


def parse_checkpoint(text: str, option: str) -> Checkpoint:
    """Return the number in `text`, or "best". Raise UsageError for another text. `option` is for the message."""
    if text != "best" and not text.isdigit():
        raise UsageError(f"{option}: expected the number of a checkpoint, or best, got {text!r}.")
    return "best" if text == "best" else int(text)


def read_checkpoint(directory: RunDir, checkpoint: Checkpoint = None) -> SavedCheckpoint:
    """Read a checkpoint of a run. Write nothing, so that the run can continue to train.

    Args:
        directory: directory of the run.
        checkpoint: name of the checkpoint, "best" for the one with the best evaluation, or None for the newest one.

    Raises:
        CheckpointError: the checkpoint does not exist or is damaged.
    """
    found = _find(directory, checkpoint)
    while True:
        try:
            with contextlib.closing(Checkpointer(found.parent)) as checkpointer:
                return checkpointer.read(int(found.name))
        except CheckpointError:
            before, found = found, _find(directory, checkpoint)
            if found == before:  # otherwise, the run has replaced the checkpoint while it was read
                raise


def _find(directory: RunDir, checkpoint: Checkpoint) -> pathlib.Path:
    """Return the path of a checkpoint. See `read_checkpoint` for the arguments and errors."""
    if checkpoint != "best":
        return directory.checkpoints / str(Checkpointer(directory.checkpoints).existing(checkpoint))
    best = BestCheckpoint(directory.checkpoints)
    if (found := best.read()) is None:
        raise CheckpointError(
            f"There is no best checkpoint in {directory.checkpoints}: the run has not completed an evaluation. A run "
            "of a game evaluates every --eval-every steps and at its end, unless eval_episodes is 0. Leave the "
            "checkpoint out to use the newest one."
        )
    return best.directory / str(found.step)


def read_policy(agent: Agent, saved: SavedCheckpoint) -> LocalParams:
    """Return the parameters for acting in a checkpoint.

    Raises:
        CheckpointError: the checkpoint belongs to another agent or network.
    """
    params, learner_state = saved.tree(InitialState(agent).make(seed=0)[:2])
    found = LocalParams()
    found.publish(saved.extras["counters"]["version"], PackedParams.of(agent.actor_params(params, learner_state)))
    return found


def checkpoint_of_version(checkpoints: pathlib.Path, version: int) -> int | None:
    """Return the name of the newest checkpoint with this version of the parameters, or None if there is none."""
    with contextlib.closing(Checkpointer(checkpoints)) as checkpointer:
        for step in reversed(checkpointer.steps()):
            with contextlib.suppress(CheckpointError):  # deleted, because there are newer ones now
                if checkpointer.read(step).extras["counters"]["version"] == version:
                    return step
    return None


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
                "The requested checkpoint was not written within %g s. The run continues without it.",
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
        newest = self._learner
        try:
            newest = read_policy(self._agent, read_checkpoint(self._directory))
        except CheckpointError as error:
            _log.warning("The newest checkpoint cannot be evaluated. %s", error)
        self.publish(*newest.get_packed(-1))  # a learner always has parameters
