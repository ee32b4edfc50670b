"""A trained policy. It needs no environment, replay buffer or learner to act."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import dm_env
import numpy as np

from rlframe.actors.evaluator import EVALUATOR_RANK
from rlframe.agents import Agent
from rlframe.agents.transforms import NormalizedParams
from rlframe.agents.trees import reset_where
from rlframe.envs.checks import MaskCheck
from rlframe.envs.codec import Codec
from rlframe.envs.layout import SpecMismatchError
from rlframe.envs.wrappers import FrameStack
from rlframe.errors import CheckpointError, UsageError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.params.publication import LocalParams
from rlframe.programs.experiment import Experiment
from rlframe.programs.options.fields import convert
from rlframe.programs.policies.saved import NEVER_SYNC, Checkpoint, read_checkpoint, read_policy
from rlframe.programs.run_dir.directory import open_run
from rlframe.programs.topologies.config import EnvOptions
from rlframe.programs.topologies.makers import make_agent
from rlframe.types import FIRST, LAST, MID, AgentState, TimeStep, Tree, global_env_ids


class TrainedPolicy:
    """A trained policy. It keeps the state of its episodes, so each thread needs a separate instance.

    Args:
        agent: the agent.
        codec: codec of a single training environment.
        params: parameters for acting.
        seed: seed for agents that draw random numbers.
        frame_stack: number of newest observations that the policy stacks.
        check_finite: if True, raise an error for observations that contain NaN or infinity.

    Attributes:
        agent, codec: see Args.
        version: version of the parameters.
        params: parameters for acting, a tree of numpy arrays. Do not write to them.
        statistics: mean and variance of the observations if the run normalizes them (`RunningStatistics`), else `()`. A
            tree of numpy arrays.
        state: recurrent state after the last call, a tree of arrays [B, ...]; `()` for an agent without state.
    """

    def __init__(
        self,
        agent: Agent,
        codec: Codec,
        params: LocalParams,
        seed: int = 0,
        frame_stack: int = 1,
        check_finite: bool = True,
    ) -> None:
        self.agent, self.codec, self.version = agent, codec, params.version
        _, self.params = params.get_params()
        self.statistics: Tree = ()
        if isinstance(self.params, NormalizedParams):
            self.params, self.statistics = self.params
        self._codec_of_pool = Codec.of_specs(agent.observation_spec, agent.action_spec)
        self._frame_stack, self._check_finite = frame_stack, check_finite
        self._mask_check = MaskCheck(codec.observation_spec)
        self._stack: FrameStack | None = None
        self.state: AgentState = ()
        self._inferencers = {
            explore: Inferencer(
                InferencerConfig(sync_interval=NEVER_SYNC, greedy=not explore, seed=seed), agent, params
            )
            for explore in (False, True)
        }
        self._begins = np.zeros(0, bool)  # True for environments that begin an episode in the next call
        self.reset()

    def reset(self, ended: np.ndarray | None = None) -> None:
        """Begin new episodes.

        Args:
            ended: [B] bool, True for each environment of the last batch that begins a new episode. None means all
                environments; the next batch can then have a different size.
        """
        if ended is None:
            self._env_ids = global_env_ids(EVALUATOR_RANK, np.arange(0))
        elif np.shape(ended) != np.shape(self._env_ids):
            raise UsageError(f"reset needs a bool for each of {len(self._env_ids)} environments, got {ended!r}.")
        else:
            self._begins = self._begins | np.asarray(ended, bool)

    def act(self, observation: Tree, *, state: AgentState = None, explore: bool = False) -> Tree:
        """Act on one observation, or on a batch with one observation of each environment.

        Args:
            observation: observation of an environment, [...], or of B environments, [B, ...]. It can also be a
                `TimeStep` of a dm_env environment or of an rlframe pool, whose `step_type` marks the start of episodes.
            state: recurrent state to use, [B, ...]. None means the state after the previous call.
            explore: if True, explore as in training: sample the action, or act at random with the agent's probability.

        Returns:
            The action for the environment, [...] or [B, ...]. For a pool's TimeStep, the action for the pool.

        Raises:
            UsageError: the observation is outside the observation space of training, its action mask allows no action,
                or the number of environments has changed without a `reset`.
        """
        codec, given = self.codec, None
        if isinstance(observation, dm_env.TimeStep):
            codec = self._codec_of_pool if np.ndim(observation.step_type) else codec
            given, observation = np.atleast_1d(observation.step_type), observation.observation
        leaves, is_single = self._encoded(codec, observation)
        size = len(leaves[0])
        inferencer = self._inferencers[convert(bool, explore, "explore")]
        initial = inferencer.initial_state(size)
        if not len(self._env_ids):
            self._env_ids = global_env_ids(EVALUATOR_RANK, np.arange(size))
            self._begins, self.state = np.ones(size, bool), initial
            if self._frame_stack > 1:
                self._stack = FrameStack(self._frame_stack, self.codec.observation_spec, size)
        elif size != len(self._env_ids):
            raise UsageError(
                f"The policy acts in {len(self._env_ids)} environments, got observations of {size}: call reset() first."
            )
        begins = self._begins if given is None else self._begins | (given == FIRST)
        zeros = np.zeros(size, np.float32)
        timestep = TimeStep(np.where(begins, FIRST, MID), zeros, zeros + 1, codec.layout.unflatten(leaves))
        is_blocked = self._mask_check.find(timestep) & (True if given is None else given != LAST)
        if is_blocked.any():
            raise UsageError(
                f"The action mask in row {int(is_blocked.argmax())} of the observations allows no action: expected at "
                "least one legal action."
            )
        if self._stack is not None and codec is self.codec:
            timestep = self._stack(timestep)
        before = reset_where(timestep.step_type == FIRST, self.state, initial) if state is None else state
        output, self.state = inferencer.inference(self._env_ids, timestep, before)
        self._begins = np.zeros(size, bool)
        action = codec.action.decode(np.asarray(output.action))
        return action[0] if is_single else action

    def _encoded(self, codec: Codec, observation: Tree) -> tuple[list[np.ndarray], bool]:
        """Return (leaves, is_single): the observation's leaves as arrays [B, ...]. B is 1 for a single observation."""
        is_single = True
        try:
            first, leaf = codec.layout.flatten(observation)[0], codec.leaves[0]
            with contextlib.suppress(ValueError):  # `encode` raises a clearer error for a ragged list
                is_single = np.ndim(first) <= len(leaf.spec.shape)
            encoded = codec.encode(observation, is_batch=not is_single)
            leaves = [np.asarray(value, leaf.spec.dtype) for value, leaf in zip(encoded, codec.leaves, strict=True)]
            if self._check_finite:
                for leaf, value in zip(codec.leaves, leaves, strict=True):
                    leaf.check_finite(value)
        except SpecMismatchError as error:
            if error.place is not None:
                raise
            raise UsageError(
                f"{error} The policy needs one observation of its environment, or a batch of them."
            ) from error
        if is_single:
            return [leaf[None] for leaf in leaves], True
        if len({len(leaf) for leaf in leaves}) > 1 or not len(leaves[0]):
            raise UsageError(
                f"The leaves of the observation have batch sizes {[len(leaf) for leaf in leaves]}: "
                "expected the same size for all leaves, at least 1."
            )
        return leaves, False


def load(
    run_dir: str | os.PathLike[str], checkpoint: Checkpoint = None, *, agent: Any = None, network: Any = None
) -> TrainedPolicy:
    """Load the trained policy of a run. This creates no environments and writes no files.

    Args:
        run_dir: directory of the run. The run can still be training.
        checkpoint: name of a checkpoint in RUN_DIR/checkpoints, or "best" for the checkpoint whose evaluation had the
            highest mean return. None means the newest one.
        agent, network: as for `rlframe.train`, to replace the run's agent and network. Required if they were defined in
            a notebook and do not exist in this process.

    Raises:
        UsageError: the directory contains no run, the run trains a language model, or the agent's file is missing.
        CheckpointError: the checkpoint does not exist or is damaged.
    """
    made, codec, params, experiment = load_trained(run_dir, checkpoint, agent, network)
    config = EnvOptions.of(experiment)
    return TrainedPolicy(
        made, codec, params, experiment.seed, config.frame_stack, check_finite=config.check_finite is not False
    )


def load_trained(
    run_dir: str | os.PathLike[str], checkpoint: Checkpoint, agent: Any, network: Any
) -> tuple[Agent, Codec, LocalParams, Experiment]:
    """Load an agent, its environments' codec, its parameters and its experiment. Arguments are as for `load`."""
    checkpoint = convert(Checkpoint, checkpoint, "checkpoint")
    directory, experiment = open_run(run_dir, {"agent": agent, "network": network})
    saved = read_checkpoint(directory, checkpoint)
    codec = saved.extras.get("codec")
    if codec is None:
        raise CheckpointError(
            f"The checkpoint {saved.path} was written by an earlier version of rlframe. It does not contain the "
            "environments' codec, which a policy needs to act. Load it with that version, or train again: "
            f"rlframe train --config {directory.config}"
        )
    made = make_agent(experiment, codec)
    return made, codec, read_policy(made, saved), experiment
