"""A policy that was trained: it acts without environment, replay or learner, and can be a file for other tools."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlframe.actors.evaluator import EVALUATOR_RANK
from rlframe.actors.lanes import zero_at_first
from rlframe.agents import Agent
from rlframe.errors import UsageError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.interprocess.files import write_atomically
from rlframe.learners.checkpoints import Checkpointer
from rlframe.params.source import NewestParams
from rlframe.programs.experiment import Experiment
from rlframe.programs.restored import restored
from rlframe.programs.run_dir import open_run
from rlframe.programs.topologies.parts import make_agent
from rlframe.types import FIRST, MID, AgentState, TimeStep, Tree, global_env_ids

_NEVER = 2**62  # calls


class TrainedPolicy:
    """One version of what an agent has learned. It remembers the episodes that it acts in, so give each thread its own.

    Args:
        agent: the agent.
        params: the parameters that act.
        seed: of the random numbers of an agent that draws any.
        frame_stack: how many observations of the environment each one is made of; errors say so.

    Attributes:
        agent: the agent.
        version: of the parameters.
        state: recurrent state after the last call, a tree of [B, ...]; `()` for an agent without one.
    """

    def __init__(self, agent: Agent, params: NewestParams, seed: int = 0, frame_stack: int = 1) -> None:
        self._frame_stack = frame_stack
        self.agent, self.version = agent, params.version
        self.state: AgentState = ()
        self._inferencers = {
            greedy: Inferencer(InferencerConfig(sync_interval=_NEVER, greedy=greedy, seed=seed), agent, params)
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
            observation: as the environment gives it, [...], or [B, ...] of B environments that are in step. Casts that
                keep the kind of number are allowed.
            state: recurrent state to act in, [B, ...]; None: what the call before led to.
            greedy: whether to act without exploring.

        Returns:
            The action, [...] or [B, ...], as the environment takes it.

        Raises:
            UsageError: the observation is not what the agent was trained on, or of another number of environments.
        """
        batch, is_single = self._batch(observation)
        size = len(jax.tree.leaves(batch)[0])
        inferencer = self._inferencers[greedy]
        initial = inferencer.initial_state(size)
        if not len(self._env_ids):
            self._env_ids = global_env_ids(EVALUATOR_RANK, np.arange(size))
            self._begins, self.state = np.ones(size, bool), initial
        elif size != len(self._env_ids):
            raise UsageError(
                f"The policy acts in {len(self._env_ids)} environments, got observations of {size}: call reset() first."
            )
        step_type = np.where(self._begins, FIRST, MID)
        timestep = TimeStep(step_type, np.zeros(size, np.float32), np.ones(size, np.float32), batch)
        before = zero_at_first(timestep, self.state, initial) if state is None else state
        output, self.state = inferencer.inference(self._env_ids, timestep, before)
        self._begins = np.zeros(size, bool)
        return jax.tree.map(lambda leaf: leaf[0], output.action) if is_single else output.action

    def _batch(self, observation: Tree) -> tuple[Tree, bool]:
        """(the observation as [B, ...] in the dtypes of its spec, whether it was a single one)."""
        specs, structure = jax.tree.flatten(self.agent.observation_spec)
        if jax.tree.structure(observation) != structure:
            raise UsageError(
                f"The agent was trained on observations like {self.agent.observation_spec}, got {observation!r}."
            )
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(observation)]
        is_single = all(leaf.shape == spec.shape for leaf, spec in zip(leaves, specs))
        size = leaves[0].shape[:1]
        for leaf, spec in zip(leaves, specs):
            fits = is_single or (size and leaf.shape == (*size, *spec.shape))
            if not fits or not np.can_cast(leaf.dtype, spec.dtype, "same_kind"):
                stacked = (
                    f" Each holds the environment's newest {self._frame_stack}: step a "
                    f"SyncEnv(..., frame_stack={self._frame_stack}), which stacks them."
                )
                raise UsageError(
                    f"The agent was trained on observations ({spec.name}) of {spec.dtype} and shape {spec.shape}, one "
                    f"or a batch of them; got {leaf.dtype} and shape {leaf.shape}."
                    + (stacked if self._frame_stack > 1 else "")
                )
        leaves = [leaf.astype(spec.dtype, copy=False) for leaf, spec in zip(leaves, specs)]
        return structure.unflatten([leaf[None] for leaf in leaves] if is_single else leaves), is_single


def load(run_dir: str | os.PathLike[str], checkpoint: int | None = None) -> TrainedPolicy:
    """Load what a run has learned, to act by: no environment is opened, and nothing is written.

    Args:
        run_dir: the run's directory. The run may go on.
        checkpoint: one of RUN_DIR/checkpoints, by its name; None: the newest.

    Raises:
        UsageError: there is no run in the directory, or it is of a language model; or its agent's file has gone.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    agent, params, experiment = _trained(run_dir, checkpoint)
    return TrainedPolicy(agent, params, experiment.seed, getattr(experiment.topology, "frame_stack", 1))


def _trained(run_dir: str | os.PathLike[str], checkpoint: int | None) -> tuple[Agent, NewestParams, Experiment]:
    directory, experiment = open_run(run_dir)
    checkpointer = Checkpointer(directory.checkpoints)
    try:
        specs = checkpointer.extras(checkpoint)["specs"]
    finally:
        checkpointer.close()
    agent = make_agent(experiment, *specs)
    return agent, restored(agent, directory, checkpoint), experiment


def export(
    run_dir: str | os.PathLike[str], file: str | os.PathLike[str], checkpoint: int | None = None
) -> pathlib.Path:
    """Write what a run has learned as StableHLO, its parameters with it, to be run by JAX alone, or other tools.

    `jax.export.deserialize(file.read_bytes()).call(observation, begins, state, seed)` gives (action, state), for any
    number B of environments: observation [B, ...]; begins [B] bool, where an episode begins; state, a list of [B, ...]
    as the call before gave it, of any values where an episode begins (`[]` for an agent without one); seed [] uint32,
    another in each call, of agents that draw random numbers. It acts without exploring.

    Args:
        run_dir, checkpoint: as for `load`.
        file: what is written.

    Returns:
        The file's path.

    Raises:
        UsageError, CheckpointError: as `load`.
    """
    from jax import export as jax_export

    path = pathlib.Path(file).absolute()
    agent, source, _ = _trained(run_dir, checkpoint)
    _, params = source.get_params()
    initial, structure = jax.tree.flatten(jax.tree.map(np.asarray, agent.initial_state(1)))

    def act(observation: Tree, begins: Any, kept: list[Any], seed: Any) -> tuple[Tree, list[Any]]:
        size = begins.shape[0]

        def choose(fresh: np.ndarray, leaf: jax.Array) -> jax.Array:
            return jnp.where(begins.reshape((size,) + (1,) * (leaf.ndim - 1)), jnp.asarray(fresh), leaf)

        zeros = jnp.zeros(size, jnp.float32)
        timestep = TimeStep(jnp.where(begins, FIRST, MID), zeros, zeros + 1, observation)
        state = structure.unflatten(map(choose, initial, kept))
        output, state = agent.eval_step(jax.random.PRNGKey(seed), params, timestep, state)
        return output.action, jax.tree.leaves(state)

    (size,) = jax_export.symbolic_shape("B")
    observation = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype), agent.observation_spec
    )
    state = [jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype) for leaf in initial]
    begins, seed = jax.ShapeDtypeStruct((size,), bool), jax.ShapeDtypeStruct((), np.uint32)
    exported = jax_export.export(jax.jit(act), platforms=("cpu", "cuda", "tpu"))(observation, begins, state, seed)
    write_atomically(path, bytes(exported.serialize()))
    return path
