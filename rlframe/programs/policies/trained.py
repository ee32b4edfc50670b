"""A policy that was trained: it acts without environment, replay or learner."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Union

import dm_env
import numpy as np

from rlframe.actors.evaluator import EVALUATOR_RANK
from rlframe.actors.stepper import reset_at_first
from rlframe.agents import Agent
from rlframe.envs.codec import Codec
from rlframe.envs.layout import SpecMismatchError
from rlframe.envs.wrappers import FrameStack
from rlframe.errors import CheckpointError, UsageError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.learners.checkpoints import Checkpointer
from rlframe.params.publication import LocalParams
from rlframe.programs.experiment import Experiment
from rlframe.programs.options.fields import convert
from rlframe.programs.policies.saved import NEVER_SYNC, read_policy
from rlframe.programs.run_dir.directory import open_run
from rlframe.programs.topologies.config import EnvOptions
from rlframe.programs.topologies.makers import make_agent
from rlframe.types import FIRST, MID, AgentState, TimeStep, Tree, global_env_ids


class TrainedPolicy:
    """One version of what an agent has learned. It remembers the episodes that it acts in, so give each thread its own.

    Args:
        agent: the agent.
        codec: of the environments that it was trained in, one by one.
        params: the parameters that act.
        seed: of the random numbers of an agent that draws any.
        frame_stack: how many observations the agent sees as one; the policy stacks them.
        check_finite: whether NaN and infinity in an observation are refused.

    Attributes:
        agent, codec: see above.
        version: of the parameters.
        state: recurrent state after the last call, a tree of [B, ...]; `()` for an agent without one.
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
        self._codec_of_pool = Codec.of_specs(agent.observation_spec, agent.action_spec)
        self._frame_stack, self._check_finite = frame_stack, check_finite
        self._stack: FrameStack | None = None
        self.state: AgentState = ()
        self._inferencers = {
            greedy: Inferencer(InferencerConfig(sync_interval=NEVER_SYNC, greedy=greedy, seed=seed), agent, params)
            for greedy in (True, False)
        }
        self._begins = np.zeros(0, bool)  # which of the environments of the last batch begin an episode
        self.reset()

    def reset(self, ended: np.ndarray | None = None) -> None:
        """Begin new episodes.

        Args:
            ended: [B] bool, which environments of the last batch begin one; None: all, of which there may be another
                number.
        """
        if ended is None:
            self._env_ids = global_env_ids(EVALUATOR_RANK, np.arange(0))
        elif np.shape(ended) != np.shape(self._env_ids):
            raise UsageError(f"reset takes a bool for each of {len(self._env_ids)} environments, got {ended!r}.")
        else:
            self._begins = self._begins | np.asarray(ended, bool)

    def act(self, observation: Tree, *, state: AgentState = None, greedy: bool = True) -> Tree:
        """Act on one observation, or on a batch of them: one of each environment.

        Args:
            observation: as the environment gives it, [...], or [B, ...] of B environments that are in step. Or a
                `TimeStep` of a dm_env environment, or of a pool of rlframe's, which says which episodes begin.
            state: recurrent state to act in, [B, ...]; None: what the call before led to.
            greedy: whether to act without exploring.

        Returns:
            The action, [...] or [B, ...], as the environment takes it; of a pool's TimeStep, as the pool takes it.

        Raises:
            UsageError: the observation is not in the space that the agent was trained in, or of another number of
                environments.
        """
        codec, begins = self.codec, None
        if isinstance(observation, dm_env.TimeStep):
            codec = self._codec_of_pool if np.ndim(observation.step_type) else codec
            begins, observation = np.atleast_1d(observation.step_type) == FIRST, observation.observation
        leaves, is_single = self._encoded(codec, observation)
        size = len(leaves[0])
        inferencer = self._inferencers[convert(bool, greedy, "greedy")]
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
        step_type = np.where(self._begins if begins is None else self._begins | begins, FIRST, MID)
        zeros = np.zeros(size, np.float32)
        timestep = TimeStep(step_type, zeros, zeros + 1, codec.layout.unflatten(leaves))
        if self._stack is not None and codec is self.codec:
            timestep = self._stack(timestep)
        before = reset_at_first(timestep, self.state, initial) if state is None else state
        output, self.state = inferencer.inference(self._env_ids, timestep, before)
        self._begins = np.zeros(size, bool)
        action = codec.action.decode(np.asarray(output.action))
        return action[0] if is_single else action

    def _encoded(self, codec: Codec, observation: Tree) -> tuple[list[np.ndarray], bool]:
        """(the leaves of an observation as [B, ...], whether it was a single one)."""
        is_single = True
        try:
            first, leaf = codec.layout.flatten(observation)[0], codec.leaves[0]
            with contextlib.suppress(ValueError):  # of a list whose rows differ, which `encode` refuses
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
                f"{error} The policy takes one observation of its environment, or a batch of them."
            ) from error
        if is_single:
            return [leaf[None] for leaf in leaves], True
        if len({len(leaf) for leaf in leaves}) > 1 or not len(leaves[0]):
            raise UsageError(
                f"The leaves of the observation are batches of {[len(leaf) for leaf in leaves]}: "
                "expected the same number of environments, at least 1."
            )
        return leaves, False


def load(
    run_dir: str | os.PathLike[str], checkpoint: int | None = None, *, agent: Any = None, network: Any = None
) -> TrainedPolicy:
    """Load the trained policy of a run. No environment is opened, and nothing is written.

    Args:
        run_dir: the run's directory. The run may go on.
        checkpoint: one of RUN_DIR/checkpoints, by its name; None: the newest.
        agent, network: as for `rlframe.train`, in place of the run's; needed if these were defined in a notebook and
            are not there any more.

    Raises:
        UsageError: there is no run in the directory, or it is of a language model; or its agent's file has gone.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    made, codec, params, experiment = trained(run_dir, checkpoint, agent, network)
    config = EnvOptions.of(experiment)
    return TrainedPolicy(
        made, codec, params, experiment.seed, config.frame_stack, check_finite=config.check_finite is not False
    )


def trained(
    run_dir: str | os.PathLike[str], checkpoint: int | None, agent: Any, network: Any
) -> tuple[Agent, Codec, LocalParams, Experiment]:
    """Read an agent, the codec of its environments and its parameters from a checkpoint; arguments as for `load`."""
    checkpoint = convert(Union[int, None], checkpoint, "checkpoint")
    directory, experiment = open_run(run_dir, {"agent": agent, "network": network})
    with contextlib.closing(Checkpointer(directory.checkpoints)) as checkpointer:
        codec = checkpointer.extras(checkpoint).get("codec")
    if codec is None:
        raise CheckpointError(
            f"The checkpoint {'' if checkpoint is None else f'{checkpoint} '}in {directory.checkpoints} was written by "
            "an earlier version of rlframe: it lacks the codec of its environments, by which a policy acts. Load it "
            f"with that version, or train again: rlframe train --config {directory.config}"
        )
    made = make_agent(experiment, codec)
    return made, codec, read_policy(made, directory, checkpoint), experiment
