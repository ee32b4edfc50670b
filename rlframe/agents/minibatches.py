"""Epochs of shuffled minibatches: one learner step that is many gradient steps, at the cost of few calls.

The parameters are one vector meanwhile: Adam then runs as one loop, not as one for each array. The steps are one jitted
scan. For convolutions on a CPU, whose gradient takes 18 times as long in a loop, each minibatch is a jitted call of its
own. (To unroll the loop is as quick, but takes a minute to compile.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlframe import compilation
from rlframe.errors import UsageError
from rlframe.types import Batch, Logs, Params, Tree

Carry = tuple[jax.Array, Any]  # parameters as one vector, optimizer state


class MinibatchUpdates:
    """Call an agent's `compute_gradients` and `apply_gradients` for each minibatch of each epoch.

    `compute_gradients`, and so `loss`, gets the parameters as a tree, and a `Batch` whose `data` are the rows of one
    minibatch. `apply_gradients` gets parameters and gradients as one vector each: begin with
    `initial_learner_state(ravel(params))`. Both get the learner state of the step's beginning, with the newest
    `opt_state`; `update_learner_state` is called once, at the end.

    Where the agent's `jit_learner_step` is True, call it inside of jit. Otherwise call it outside: it jits its pieces.

    Args:
        agent: its learner state has an `opt_state` and an `rng`, as `LearnerState`.
        prepare: `f(params, data)` gives the rows to learn from, a tree of `[N, ...]`, by the parameters before the
            first minibatch.
        num_epochs: how often each row is learned from.
        num_minibatches: of an epoch. Where the rows do not divide into them, each epoch leaves a random few out, and
            where they are fewer, so are the minibatches: how many rows there are may depend on which actors are alive.
        envs_per_batch: environments of a full batch; None: all are full. A learner step from another batch adds its
            share to the learner state's `steps`, which is float32 then: schedules end with the steps of environments.
    """

    def __init__(
        self,
        agent: Any,
        prepare: Callable[[Params, Any], Tree],
        num_epochs: int,
        num_minibatches: int,
        envs_per_batch: int | None = None,
    ) -> None:
        self._agent, self._prepare, self._envs_per_batch = agent, prepare, envs_per_batch
        self._num_epochs, self._num_minibatches = num_epochs, num_minibatches
        self._unravel: Any = None  # known at the first call

    def __call__(self, params: Params, learner_state: Any, batch: Batch) -> tuple[Params, Any, Logs]:
        """As `Agent.learner_step`; the logs are means over the minibatches.

        Raises:
            UsageError: parameters of several dtypes.
        """
        self._unravel = self._unravel or unraveller(params)
        state = learner_state._replace(opt_state=())
        if self._agent.jit_learner_step:
            flat, rows, indices, rng = self._begin(params, learner_state.rng, batch.data)

            def step(carry: Carry, index: jax.Array | None) -> tuple[Carry, Logs]:
                return self._step(carry, rows, index, state)

            length = self._num_epochs if indices is None else len(indices)
            carry, logs = jax.lax.scan(step, (flat, learner_state.opt_state), indices, length=length)
        else:
            begin, step_of = self._jitted
            flat, rows, indices, rng = begin(params, learner_state.rng, batch.data)
            carry = (flat, jax.tree.map(jnp.copy, learner_state.opt_state))  # what is donated must be ours
            steps = []
            for index in [None] * self._num_epochs if indices is None else indices:
                carry, logs = step_of(carry, rows, index, state)
                steps.append(logs)
            logs = jax.tree.map(lambda *values: np.asarray(values), *steps)
        flat, opt_state = carry
        params = self._unravel(flat)
        steps = learner_state.steps
        learner_state = self._agent.update_learner_state(params, opt_state, learner_state._replace(rng=rng))
        if self._envs_per_batch is not None:
            learner_state = learner_state._replace(steps=steps + len(batch.data.reward) / self._envs_per_batch)
        return params, learner_state, {name: values.mean() for name, values in logs.items()}

    def indices(self, rng: jax.Array, num_rows: int) -> jax.Array | None:
        """[epochs * minibatches, rows of one]; None where each epoch is one minibatch of all rows."""
        count = min(self._num_minibatches, num_rows)
        if count == 1:
            return None
        size = num_rows // count
        order = jnp.argsort(jax.random.bits(rng, (self._num_epochs, num_rows)), axis=1)
        order = order[:, : size * count]
        return order.reshape(self._num_epochs * count, size)

    def check_rows(self, num_rows: int) -> None:
        """Raises UsageError where a whole batch, of so many rows, has fewer than there are to be minibatches."""
        if num_rows < self._num_minibatches:
            raise UsageError(
                f"{type(self._agent).__name__}: num_minibatches={self._num_minibatches} of a batch of {num_rows} rows "
                "(num_envs x unroll_length; of a recurrent network num_envs, as a row is a whole unroll). Lower "
                "--num-minibatches, or raise --num-envs."
            )

    @functools.cached_property
    def _jitted(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        begin = compilation.jit(self._begin, differentiates=False)
        return begin, compilation.jit(self._step, donate_argnums=(0,), differentiates=True)

    def _begin(self, params: Params, rng: jax.Array, data: Any) -> tuple[jax.Array, Tree, jax.Array | None, jax.Array]:
        """(parameters as one vector, rows, indices of the minibatches, the next rng)."""
        rng, shuffle_rng = jax.random.split(rng)
        rows = self._prepare(params, data)
        return ravel(params), rows, self.indices(shuffle_rng, len(jax.tree.leaves(rows)[0])), rng

    def _step(self, carry: Carry, rows: Tree, index: jax.Array | None, state: Any) -> tuple[Carry, Logs]:
        flat, opt_state = carry
        state = state._replace(opt_state=opt_state)
        data = rows if index is None else jax.tree.map(lambda leaf: leaf[index], rows)
        logs, grads = self._agent.compute_gradients(self._unravel(flat), state, Batch(data, (), (), ()))
        flat, opt_state, more = self._agent.apply_gradients(flat, ravel(grads), state)
        return (flat, opt_state), {**logs, **more}


def ravel(params: Params) -> jax.Array:
    """One vector of all the arrays of a tree.

    Raises:
        UsageError: they are of several dtypes.
    """
    leaves = jax.tree.leaves(params)
    if len({leaf.dtype for leaf in leaves}) > 1:
        dtypes = ", ".join(sorted({str(leaf.dtype) for leaf in leaves}))
        raise UsageError(f"MinibatchUpdates needs parameters of one dtype, got {dtypes}.")
    return _joined(leaves)


@functools.partial(jax.jit, inline=True)
def _joined(arrays: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([array.ravel() for array in arrays])


def unraveller(params: Params) -> Callable[[jax.Array], Params]:
    """The inverse of `ravel`, for trees like `params`."""
    leaves, treedef = jax.tree.flatten(params)
    shapes = [leaf.shape for leaf in leaves]
    ends = list(np.cumsum([leaf.size for leaf in leaves]))

    def unravel(flat: jax.Array) -> Params:
        parts = jnp.split(flat, ends[:-1])
        return treedef.unflatten([part.reshape(shape) for part, shape in zip(parts, shapes)])

    return unravel
