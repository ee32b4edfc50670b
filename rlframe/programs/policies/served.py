"""Load the model for `rlframe serve policy`, and choose the source of its newer weights."""

from __future__ import annotations

import os
import pathlib
import time
from typing import Any, NamedTuple

from rlframe import handles
from rlframe.agents import Agent
from rlframe.errors import CheckpointError, PeerError, UsageError
from rlframe.language.model import ModelConfig, weights
from rlframe.learners import Checkpointer
from rlframe.params.publication import LocalParams
from rlframe.programs.options.saved_experiment import load_experiment
from rlframe.programs.policies.saved import read_checkpoint, read_policy
from rlframe.programs.run_dir.directory import RunDir
from rlframe.programs.topologies.language import Language
from rlframe.programs.topologies.makers import make_agent
from rlframe.types import Params, Tree

_BYTES = 512  # maximum vocabulary size for which the byte tokenizer is the default
_POLL = 1.0  # seconds between two checks of the directory


class ServedPolicy(NamedTuple):
    """Arguments of a `PolicyServer`."""

    model_config: ModelConfig
    tokenizer: str
    learner: Any
    params: Params | None


def policy_of_folder(folder: str, tokenizer: str | None, learner: str | None, dtype: str | None) -> ServedPolicy:
    """Load the model in a folder as version 0. Newer versions come from the learner at HOST:PORT, if it is given.

    Raises:
        UsageError, CheckpointError: as for `weights.load`. UsageError also if the address is invalid or the tokenizer
            is unknown.
    """
    source = _at(learner)
    model_config, params = weights.load(folder, dtype=dtype)
    return ServedPolicy(model_config, tokenizer or _tokenizer_of(folder, model_config), source, params)


def policy_of_run(path: str | os.PathLike[str], tokenizer: str | None, learner: str | None) -> ServedPolicy:
    """Load the model of a run. Its weights come from the learner at HOST:PORT, or if None, from the newest checkpoint.

    Raises:
        UsageError: the directory contains no run of a language model, or the address is invalid.
    """
    source = _at(learner)
    directory = RunDir(path)
    directory.check_kind()
    experiment = load_experiment(directory.config)
    config = experiment.topology_config
    if not isinstance(config, Language):
        raise UsageError(f"The run in {path} does not train a language model: its agent is {experiment.agent}.")
    agent: Any = make_agent(experiment)
    source = source or NewestCheckpoint(agent, directory)
    return ServedPolicy(
        agent.model_config,
        tokenizer or config.tokenizer_name(experiment.agent_config),
        source,
        None,
    )


class NewestCheckpoint:
    """A source of parameters that follows the newest checkpoint of a run.

    Args:
        agent: agent of the run.
        directory: directory of the run.
    """

    def __init__(self, agent: Agent, directory: RunDir) -> None:
        self._agent, self._directory = agent, directory
        self._steps: list[int] | None = None  # the steps of the checkpoints that existed when `_newest` was read
        self._newest: LocalParams | None = None
        self._looked = 0.0

    def get_params(self, known_version: int = -1) -> tuple[int, Tree | None]:
        """Return (version, parameters) like `Learner.get_params`.

        Raises:
            PeerError: the newest checkpoint cannot be read or does not exist yet.
        """
        now = time.monotonic()
        if self._newest is None or now > self._looked + _POLL:
            self._looked = now
            steps = Checkpointer(self._directory.checkpoints).steps()
            if self._newest is None or (steps and steps != self._steps):
                try:
                    self._newest = read_policy(self._agent, read_checkpoint(self._directory))
                except CheckpointError as error:
                    raise PeerError(str(error)) from error
                self._steps = steps
        return self._newest.get_params(known_version)


def _at(address: str | None) -> Any:
    if address is None:
        return None
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise UsageError(f"The address of a learner must be HOST:PORT, got {address!r}.")
    return handles.Remote([address], "learner")


def _tokenizer_of(folder: str, model_config: ModelConfig) -> str:
    if (pathlib.Path(folder) / "tokenizer.json").is_file():
        return folder
    if model_config.vocab_size > _BYTES:
        raise UsageError(
            f"The folder {folder} has no tokenizer.json, and its model has {model_config.vocab_size} tokens, too many "
            "for the byte tokenizer. Give the folder of the tokenizer with --tokenizer."
        )
    return "byte"
