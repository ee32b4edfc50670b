"""Warm start: a new run begins with the parameters and the statistics of another run (`--init-from`).

The launcher writes them as checkpoint 0 of the new run, before the nodes start. The learner then starts from it as from
any checkpoint, in every topology, and a resumed run does not need the other run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from rlframe.errors import UsageError
from rlframe.learners import Checkpointer
from rlframe.learners.initial_state import InitialState
from rlframe.programs.options.config_file import load_experiment
from rlframe.programs.policies.saved import Checkpoint, parse_checkpoint, read_checkpoint
from rlframe.programs.run_dir.directory import RunDir
from rlframe.programs.session import Session
from rlframe.programs.topologies.makers import make_agent
from rlframe.types import Tree

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
