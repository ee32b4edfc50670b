"""Policies in the checkpoints of a run: read them, wait until one is saved, and start a new run from one.

A warm start (`--init-from`) begins a new run with the parameters and the statistics of another run. The launcher writes
them as checkpoint 0 of the new run, before the nodes start. The learner then starts from it as from any checkpoint, in
every topology, and a resumed run does not need the other run.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pathlib
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Union

import jax
import numpy as np

from rlframe import handles
from rlframe.agents import Agent
from rlframe.errors import CheckpointError, StoppedError, UsageError
from rlframe.learners import Checkpointer
from rlframe.learners.checkpoints import SavedCheckpoint
from rlframe.learners.saving import BestCheckpoint
from rlframe.learners.update import InitialState
from rlframe.params.packing import PackedParams
from rlframe.params.publication import LocalParams
from rlframe.programs.options.saved_experiment import load_experiment
from rlframe.programs.run_dir.directory import RunDir
from rlframe.programs.session import Session
from rlframe.programs.topologies.makers import make_agent
from rlframe.types import Tree

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


_NAMED = 8  # maximum number of arrays in a message

Arrays = dict[str, Any]  # name of an array, such as params['torso']['w'] -> array


class Source(NamedTuple):
    """The state of the other run."""

    path: os.PathLike[str]  # path of the checkpoint
    config: os.PathLike[str]  # config.json of the run
    params: Tree
    learner_state: Any


def write_initial_checkpoint(session: Session) -> str:
    """Write checkpoint 0 of a new run, with the parameters and statistics of `experiment.init_from`.

    The optimizer, the counters and the random numbers are new. Target networks start from the loaded parameters.

    Returns:
        Sentences for the terminal: the source, and the arrays that were not loaded.

    Raises:
        UsageError: the source is not a run, or its arrays do not fit (without `init_skip_mismatched`), or none fits.
        CheckpointError: the source's checkpoint does not exist or is damaged, or this one could not be written.
    """
    experiment, agent = session.experiment, session.agent
    source = read_source(str(experiment.init_from), experiment.named_options)
    params, learner_state, _ = InitialState(agent).make(experiment.seed)
    wanted = _named(params, _statistics_of(learner_state))
    given = _named(source.params, _statistics_of(source.learner_state))
    problems = mismatches(wanted, given)
    loaded = wanted.keys() - problems.keys()
    if problems and not (experiment.init_skip_mismatched and loaded):
        hint = (
            "To load only the arrays that fit, add --init-skip-mismatched (init_skip_mismatched)."
            if loaded
            else "No array fits."
        )
        raise UsageError(
            f"init_from: the checkpoint {source.path} does not fit this run. {_list(problems)} To keep the network and "
            f"the options of that run, add --config {source.config}. {hint}"
        )

    def choose(prefix: str, tree: Tree) -> Tree:
        names = [prefix + jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
        leaves = [given[name] if name in loaded else wanted[name] for name in names]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    params, learner_state, _ = InitialState(agent).make(experiment.seed, choose("params", params))
    if "statistics" in getattr(learner_state, "_fields", ()):
        learner_state = learner_state._replace(statistics=choose("statistics", learner_state.statistics))
    saved = {"counters": {"learner_steps": 0, "version": 1}, "codec": session.codec, "extras": None}
    with contextlib.closing(Checkpointer(session.directory.checkpoints)) as checkpointer:
        checkpointer.save(0, jax.tree.map(np.asarray, (params, learner_state)), saved)
    said = f"The run starts from {source.path}: {len(loaded)} of {len(wanted)} arrays."
    return f"{said} Not loaded: {_list(problems)}" if problems else said


def read_source(text: str, given: Mapping[str, Any]) -> Source:
    """Read the checkpoint that `init_from` names.

    Args:
        text: RUN_DIR, RUN_DIR@STEP or RUN_DIR@best.
        given: see `load_experiment`.

    Raises:
        UsageError: the directory contains no run, or the part after @ is invalid.
        CheckpointError: the checkpoint does not exist or is damaged.
    """
    path, at, name = text.rpartition("@")
    checkpoint: Checkpoint = None
    if at and not os.path.isdir(text):
        checkpoint = parse_checkpoint(name, "init_from")
    directory = RunDir(path if checkpoint is not None else text)
    directory.check_kind()
    saved = read_checkpoint(directory, checkpoint)
    agent = make_agent(load_experiment(directory.config, given), saved.extras.get("codec"))
    return Source(saved.path, directory.config, *saved.tree(InitialState(agent).make(seed=0)[:2]))


def mismatches(wanted: Arrays, given: Arrays) -> dict[str, str]:
    """Return a dict: name of each array that cannot be loaded, or that this run does not have -> reason.

    The mean, the variance and the count of a statistic belong together, so all of them are loaded or none.
    """
    problems = {name: why for name in wanted if (why := _mismatch(wanted[name], given.get(name)))}
    problems |= {
        name: f"{_describe(array)} in the checkpoint, not in this run"
        for name, array in given.items()
        if name not in wanted
    }
    for name in wanted:
        others = [
            other for other in problems if _statistic(other) is not None and _statistic(other) == _statistic(name)
        ]
        if name not in problems and others:
            problems[name] = f"belongs to {others[0]}"
    return problems


def _mismatch(wanted: Any, given: Any) -> str:
    if given is None:
        return f"not in the checkpoint, {_describe(wanted)} in this run"
    if (np.shape(wanted), wanted.dtype) != (np.shape(given), given.dtype):
        return f"{_describe(given)} in the checkpoint, {_describe(wanted)} in this run"
    return ""


def _statistic(name: str) -> str | None:
    """Return `statistics.observation` for `statistics.observation.mean[0]`, and None for a parameter."""
    return ".".join(name.split(".")[:2]) if name.startswith("statistics.") else None


def _describe(array: Any) -> str:
    return f"{np.shape(array)} {array.dtype}"


def _list(problems: Mapping[str, str]) -> str:
    named = [f"{name}: {why}" for name, why in list(problems.items())[:_NAMED]]
    return "; ".join(named) + f"; and {len(problems) - _NAMED} more" * (len(problems) > _NAMED) + "."


def _statistics_of(learner_state: Any) -> Tree:
    """Return the field `statistics` of a learner state, such as those of `Normalized`. Return () without this field."""
    return getattr(learner_state, "statistics", ())


def _named(params: Tree, statistics: Tree) -> Arrays:
    trees = {"params": params, "statistics": statistics}
    return {
        prefix + jax.tree_util.keystr(path): leaf
        for prefix, tree in trees.items()
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
