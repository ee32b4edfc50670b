"""Steps as they travel: those that follow each other stacked into whole arrays, each observation once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlframe.types import Step, TimeStep


class Stack(NamedTuple):
    """K steps of the same environments, each of which begins where the one before ended."""

    env_ids: np.ndarray  # [B] int64
    timesteps: TimeStep  # [K + 1, B, ...]
    rest: Any  # (agent_output, agent_state), [K, B, ...]
    versions: tuple[Any, ...]  # K parameters' versions


class Added(NamedTuple):
    """A step that was added, in arrays of its own."""

    env_ids: np.ndarray
    step: Step

    @property
    def nbytes(self) -> int:
        """Bytes of what is not the step's before it."""
        step = self.step
        leaves = jax.tree.leaves((step.next_timestep, step.agent_output, step.agent_state))
        return sum(leaf.nbytes for leaf in leaves)


def copied(env_ids: np.ndarray, step: Step, before: tuple[Step, Added] | None) -> Added:
    """Copies a step: its arrays may be the environments' own, which they write to again.

    Args:
        env_ids: [B] int64.
        step: see `ReplayWriter.add`.
        before: the step that was added before this one, and its copy.
    """
    timestep = step.timestep
    if before is not None and before[0].next_timestep is timestep:
        timestep = before[1].step.next_timestep
    else:
        timestep = _copy(timestep)
    rest = _copy((step.agent_output, step.agent_state, step.next_timestep))
    return Added(np.array(env_ids, np.int64), Step(timestep, rest[0], rest[1], step.params_version, rest[2]))


def stacked(steps: Sequence[Added]) -> list[Stack]:
    """Stacks steps that were copied one after another."""
    runs: list[list[Added]] = []
    for added in steps:
        if runs and _follows(runs[-1][-1], added):
            runs[-1].append(added)
        else:
            runs.append([added])
    return [_stack(run) for run in runs]


def unstacked(stack: Stack) -> Iterator[Step]:
    """The steps of a stack, as views."""
    leaves, treedef = jax.tree.flatten(stack.timesteps)
    others, other_treedef = jax.tree.flatten(stack.rest)
    following = treedef.unflatten([leaf[0] for leaf in leaves])
    for k, version in enumerate(stack.versions):
        timestep, following = following, treedef.unflatten([leaf[k + 1] for leaf in leaves])
        output, state = other_treedef.unflatten([leaf[k] for leaf in others])
        yield Step(timestep, output, state, version, following)


def _follows(before: Added, added: Added) -> bool:
    return before.step.next_timestep is added.step.timestep and np.array_equal(before.env_ids, added.env_ids)


def _stack(run: list[Added]) -> Stack:
    steps = [added.step for added in run]
    timesteps = jax.tree.map(_stack_leaves, steps[0].timestep, *(step.next_timestep for step in steps))
    rest = jax.tree.map(_stack_leaves, *((step.agent_output, step.agent_state) for step in steps))
    return Stack(run[0].env_ids, timesteps, rest, tuple(step.params_version for step in steps))


def _stack_leaves(*leaves: Any) -> np.ndarray:
    return np.stack(leaves) if len(leaves) > 1 else np.asarray(leaves[0])[None]


def _copy(tree: Any) -> Any:
    return jax.tree.map(np.array, tree)
