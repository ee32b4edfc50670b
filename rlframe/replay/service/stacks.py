"""Steps as they travel: those that follow each other stacked into whole arrays, each observation once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from rlframe.types import Step, TimeStep

_STEPS, _BYTES = 256, 8 * 2**20  # of a stage

_leaves, _flatten = jax.tree_util.tree_leaves, jax.tree_util.tree_flatten


class Stack(NamedTuple):
    """K steps of the same environments, each of which begins where the one before ended."""

    env_ids: np.ndarray  # [B] int64
    timesteps: TimeStep  # [K + 1, B, ...]
    rest: Any  # (agent_output, agent_state), [K, B, ...]
    versions: tuple[Any, ...]  # K parameters' versions


class Stage:
    """Where the steps of the same environments are copied to, one after another, until they have arrived elsewhere.

    What is added may be the environments' own arrays, which they write to again.

    Args:
        env_ids: [B] int64.
        step: the first one that it is to `put`, which says the shapes.
        before: the stage before this one: what follows each other in short runs gets little room.

    Attributes:
        count: steps that it has.
        arrived: of these.
        nbytes: of one step.
    """

    def __init__(self, env_ids: np.ndarray, step: Step, before: Stage | None = None) -> None:
        self._id_bytes, self._env_ids = env_ids.tobytes(), np.array(env_ids, np.int64)
        timestep, self._timestep_def = _flatten(step.timestep)
        rest, self._rest_def = _flatten((step.agent_output, step.agent_state))
        self.nbytes = sum(np.asarray(leaf).nbytes for leaf in (*timestep, *rest))
        steps = _STEPS if before is None else before.count * (4 if before.count == before._size else 1)
        self._size: int = max(1, min(_STEPS, steps, _BYTES // max(self.nbytes, 1)))
        self._timesteps, self._rest = _rows(timestep, self._size + 1), _rows(rest, self._size)
        self._versions: list[Any] = []
        self._next: Any = None  # what followed the last step
        self.count: int = 0
        self.arrived: int = 0
        for rows, leaf in zip(self._timesteps, timestep):
            rows[0] = leaf

    def takes(self, env_ids: np.ndarray, step: Step) -> bool:
        """Whether a step goes on from the last one, and there is room."""
        follows = self._next is step.timestep or self._next is None
        return follows and self.count < self._size and env_ids.tobytes() == self._id_bytes

    def put(self, step: Step) -> None:
        """Copies a step that it `takes`."""
        at = self.count
        for rows, leaf in zip(self._timesteps, _leaves(step.next_timestep)):
            rows[at + 1] = leaf
        for rows, leaf in zip(self._rest, _leaves((step.agent_output, step.agent_state))):
            rows[at] = leaf
        self._versions.append(step.params_version)
        self._next = step.next_timestep
        self.count = at + 1

    def stack(self, until: int) -> Stack:
        """The steps from those that arrived up to the number `until`, as views."""
        low = self.arrived
        timesteps = self._timestep_def.unflatten([rows[low : until + 1] for rows in self._timesteps])
        rest = self._rest_def.unflatten([rows[low:until] for rows in self._rest])
        return Stack(self._env_ids, timesteps, rest, tuple(self._versions[low:until]))


def unstacked(stack: Stack, skip: int = 0) -> Iterator[Step]:
    """The steps of a stack but the first `skip`, as views."""
    leaves, treedef = _flatten(stack.timesteps)
    others, other_treedef = _flatten(stack.rest)
    if skip >= len(stack.versions):
        return
    following = treedef.unflatten([leaf[skip] for leaf in leaves])
    for k in range(skip, len(stack.versions)):
        timestep, following = following, treedef.unflatten([leaf[k + 1] for leaf in leaves])
        output, state = other_treedef.unflatten([leaf[k] for leaf in others])
        yield Step(timestep, output, state, stack.versions[k], following)


def _rows(leaves: list[Any], count: int) -> list[np.ndarray]:
    return [np.empty((count, *np.shape(leaf)), np.asarray(leaf).dtype) for leaf in leaves]
