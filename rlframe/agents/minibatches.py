"""Epochs of shuffled minibatches: one learner step that consists of many gradient steps.

    rows, logs = agent.rollout_and_logs(params, data)           # _begin: for PPO, steps with advantages
    vector = ravel(params)
    for index in shuffled minibatches of all epochs:            # _scan or _loop
        logs, grads = agent.minibatch_gradients(unravel(vector), rows[index])    # of PPO.minibatch_loss
        if stops(logs): break                                   # PPO's KL limit
        vector = agent.apply_gradients(vector, ravel(grads))
    params = unravel(vector)                                    # _end
    return params, agent.update_learner_state(...), means of the logs

Between two gradient steps, all parameters are joined into one vector, and so are Adam's moments. Adam then runs one
loop instead of one loop per array. Outside a learner step, parameters and optimizer state are trees.

The gradient steps have two implementations. `_scan` is a `lax.scan` inside the Learner's jitted call. `_loop` is a
Python loop of jitted calls. It is used for convolutions on a CPU, because their gradient takes 18 times as long
inside a scan. (An unrolled scan is as fast as the loop, but takes a minute to compile.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from rlframe import compilation
from rlframe.agents.base import Agent, LearnerState
from rlframe.agents.networks import has_images
from rlframe.agents.schedules import current_values, descend_at_rate
from rlframe.errors import UsageError
from rlframe.sharding import divide_rows
from rlframe.types import Batch, Logs, Params, ReplaySpec, Sequence, SequenceBatch, Tree


class _Carry(NamedTuple):
    """State between two gradient steps."""

    vector: jax.Array  # all parameters
    opt_state: Any  # optimizer state for this vector
    is_stopped: jax.Array  # [] bool


class MinibatchUpdates:
    """Calls `gradients` and the agent's `apply_gradients` for each minibatch of each epoch.

    `apply_gradients` receives parameters, gradients and optimizer state in which all parameter arrays are joined into
    one vector. Implement it with `jax.tree.map`, which works on any tree. `gradients` and `apply_gradients` receive
    the learner state from before the learner step, but with the newest `opt_state`. `update_learner_state` is called
    once, at the end.

    If the agent's `jit_learner_step` is True, call this object inside jit. Otherwise call it outside of jit, because it
    jits its parts itself.

    Args:
        agent: an agent whose learner state has `opt_state` and `rng`, as in `LearnerState`.
        prepare: `f(params, data)` returns the rows to learn from, a tree of `[N, ...]`, and logs. It is called once,
            before the first minibatch.
        gradients: `f(params, learner_state, rows)` returns logs and gradients for the rows of one minibatch.
        num_epochs: number of times to learn from each row.
        num_minibatches: minibatches per epoch. If the number of rows is not a multiple of `num_minibatches`, each
            epoch skips a few random rows. If there are fewer rows than minibatches, each row is a minibatch. (A batch
            has fewer rows after an actor has died.)
        envs_per_batch: environments in a full batch. A smaller batch adds only a fraction of a step to the learner
            state's `steps` (float32), so that schedules follow environment steps. None treats every batch as full.
        stops: `f(logs)` returns True to stop before the gradient step with these logs. This step and later
            steps are not applied. `logs["minibatch_share"]` is the fraction of steps that were applied. None never
            stops.
    """

    def __init__(
        self,
        agent: Any,
        prepare: Callable[[Params, Any], tuple[Tree, Logs]],
        gradients: Callable[[Params, Any, Tree], tuple[Logs, Params]],
        num_epochs: int,
        num_minibatches: int,
        envs_per_batch: int | None = None,
        stops: Callable[[Logs], jax.Array] | None = None,
    ) -> None:
        self._agent, self._prepare, self._gradients, self._envs_per_batch = agent, prepare, gradients, envs_per_batch
        self._num_epochs, self._num_minibatches, self._stops = num_epochs, num_minibatches, stops
        self._unravel: Any = None  # `f(vector)` returns the tree of parameters; set at the first call

    def __call__(self, params: Params, learner_state: Any, batch: Batch) -> tuple[Params, Any, Logs]:
        """Do one learner step, as `Agent.learner_step`. The logs are means over the minibatches."""
        if self._unravel is None:
            self._unravel = ravel_pytree(params)[1]
        begin, do_gradient_steps, end = self._pieces
        carry, rows, indices, rng, logs = begin(params, learner_state, batch.data)
        carry, logs_of_steps = do_gradient_steps(carry, rows, indices, learner_state._replace(opt_state=()))
        params, opt_state = end(carry, params, learner_state.opt_state)
        after = self._agent.update_learner_state(params, opt_state, learner_state._replace(rng=rng))
        if self._envs_per_batch is not None:
            after = after._replace(steps=learner_state.steps + len(batch.data.reward) / self._envs_per_batch)
        return params, after, {**logs, **self._means(logs_of_steps, carry.is_stopped)}

    def indices(self, rng: jax.Array, num_rows: int) -> jax.Array | None:
        """Return row numbers [epochs * minibatches, rows per minibatch]. None if each minibatch is the whole batch."""
        count = min(self._num_minibatches, num_rows)
        if count == 1:
            return None
        size = num_rows // count
        order = jnp.argsort(jax.random.bits(rng, (self._num_epochs, num_rows)), axis=1)
        return order[:, : size * count].reshape(self._num_epochs * count, size)

    def check_rows(self, num_rows: int) -> None:
        """Raise UsageError if a full batch with `num_rows` rows has fewer rows than minibatches."""
        if num_rows < self._num_minibatches:
            raise UsageError(
                f"{type(self._agent).__name__}: num_minibatches={self._num_minibatches} is above the number of rows "
                f"in a batch ({num_rows}). A batch has num_envs x unroll_length rows, or num_envs rows for a recurrent "
                "network. Lower --num-minibatches, or raise --num-envs."
            )

    @functools.cached_property
    def _pieces(self) -> tuple[Callable[..., Any], ...]:
        """The functions for the start, the gradient steps and the end of a learner step."""
        if self._agent.jit_learner_step:
            return self._begin, self._scan, self._end
        begin, end = (compilation.jit(piece, differentiates=False) for piece in (self._begin, self._end))
        step = compilation.jit(self._step, donate_argnums=(0,), differentiates=True)
        return begin, functools.partial(self._loop, step), end

    def _begin(self, params: Params, learner_state: Any, data: Any) -> tuple[_Carry, Tree, Any, jax.Array, Logs]:
        """Return the first carry, the rows, the indices of the minibatches, the next rng, and logs."""
        rng, shuffle_rng = jax.random.split(learner_state.rng)
        rows, logs = self._prepare(params, data)
        is_params = _has_structure(params)
        # Copy the optimizer state: a jitted step donates its carry, but the caller still needs the learner state.
        opt_state = jax.tree.map(
            lambda tree: ravel_pytree(tree)[0] if is_params(tree) else jnp.copy(tree),
            learner_state.opt_state,
            is_leaf=is_params,
        )
        carry = _Carry(ravel_pytree(params)[0], opt_state, jnp.array(False))
        return carry, rows, self.indices(shuffle_rng, len(jax.tree.leaves(rows)[0])), rng, logs

    def _scan(self, carry: _Carry, rows: Tree, indices: Any, state: Any) -> tuple[_Carry, Logs]:
        """Do all gradient steps in one scan. Return the last carry and the logs of each step."""

        def step_unless_stopped(carry: _Carry, index: jax.Array | None) -> tuple[_Carry, Logs]:
            def step(carry: _Carry) -> tuple[_Carry, Logs]:
                return self._step(carry, rows, index, state)

            def skip(carry: _Carry) -> tuple[_Carry, Logs]:
                logs = jax.eval_shape(step, carry)[1]
                return carry, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), logs)

            return step(carry) if self._stops is None else jax.lax.cond(carry.is_stopped, skip, step, carry)

        length = self._num_epochs if indices is None else len(indices)
        return jax.lax.scan(step_unless_stopped, carry, indices, length=length)

    def _loop(
        self, step: Callable[..., Any], carry: _Carry, rows: Tree, indices: Any, state: Any
    ) -> tuple[_Carry, Logs]:
        """Do all gradient steps, each by a call of `step`, the jitted `_step`. Return the same values as `_scan`.

        `step` contains no branch, because a convolution is also slow inside a branch.
        """
        logs_of_steps: list[Logs] = []
        order = [None] * self._num_epochs if indices is None else indices
        for index in order:
            carry, logs = step(carry, rows, index, state)
            logs_of_steps.append(logs)
            if self._stops is not None and carry.is_stopped:
                break
        logs_of_steps += [jax.tree.map(np.zeros_like, logs)] * (len(order) - len(logs_of_steps))
        return carry, jax.tree.map(lambda *values: np.asarray(values), *logs_of_steps)

    def _step(self, carry: _Carry, rows: Tree, index: jax.Array | None, state: Any) -> tuple[_Carry, Logs]:
        """Do one gradient step. Discard the result if `stops(logs)` is True."""
        state = state._replace(opt_state=carry.opt_state)
        minibatch = rows if index is None else divide_rows(jax.tree.map(lambda leaf: leaf[index], rows))
        logs, grads = self._gradients(self._unravel(carry.vector), state, minibatch)
        vector, opt_state, more = self._agent.apply_gradients(carry.vector, ravel_pytree(grads)[0], state)
        after, logs = _Carry(vector, opt_state, carry.is_stopped), {**logs, **more}
        if self._stops is None:
            return after, logs
        is_stopped = self._stops(logs)
        kept = jax.tree.map(lambda old, new: jnp.where(is_stopped, old, new), carry, after)
        return kept._replace(is_stopped=is_stopped), {**logs, "minibatch_share": jnp.float32(1.0)}

    def _end(self, carry: _Carry, params: Params, opt_state: Any) -> tuple[Params, Any]:
        """Return parameters and optimizer state as trees. `params` and `opt_state` are the old values."""
        is_params = _has_structure(params)
        opt_state = jax.tree.map(
            lambda before, after: self._unravel(after) if is_params(before) else after,
            opt_state,
            carry.opt_state,
            is_leaf=is_params,
        )
        return self._unravel(carry.vector), opt_state

    def _means(self, steps: Logs, is_stopped: jax.Array) -> Logs:
        """Return the means of the logs over the gradient steps that were done."""
        means = {name: values.mean() for name, values in steps.items()}
        if self._stops is None:
            return means
        share = means.pop("minibatch_share")  # the logs of skipped steps are 0
        applied = share - is_stopped / len(steps["minibatch_share"])
        return {**{name: mean / share for name, mean in means.items()}, "minibatch_share": applied}


class MinibatchAgent(Agent):
    """Base class of on-policy agents. They learn from one unroll of each environment, in epochs of minibatches.

    A learner step calls these methods in this order:

    1. `rollout_and_logs`, once. It returns the rows of `rollout`, which a subclass defines, and logs.
    2. `minibatch_gradients` for each minibatch of these rows. It differentiates `minibatch_loss`, which a subclass
       defines.
    3. `stop_condition` on the logs, if there is one.
    4. `apply_gradients`, which passes the number of learner steps to the optimizer: see `descend_at_rate`.

    `loss` and `compute_gradients`, which other agents use for a whole batch, are never called.
    """

    replaced_methods: Mapping[str, str] = {
        "loss": "minibatch_loss(params, learner_state, rows)",
        "compute_gradients": "minibatch_gradients(params, learner_state, rows)",
    }

    @property
    def replay_spec(self) -> ReplaySpec:
        length, max_staleness = self.cfg.unroll_length, getattr(self.cfg, "max_staleness", 0)
        return ReplaySpec("queue", Sequence(length), batch_size=None, capacity=64 * length, max_staleness=max_staleness)

    @property
    def jit_learner_step(self) -> bool:
        """False for images on a CPU, where each minibatch is jitted separately; see `MinibatchUpdates`."""
        return not (has_images(self.observation_spec) and jax.default_backend() == "cpu")

    def initial_learner_state(self, params: Params) -> LearnerState:
        return super().initial_learner_state(params)._replace(steps=jnp.float32(0))

    def rollout_and_logs(self, params: Params, data: SequenceBatch) -> tuple[Any, Logs]:
        """Return the rollout, and logs about the rollout."""
        return self.rollout(params, data), {}

    def rollout(self, params: Params, data: SequenceBatch) -> Any:
        """Return the rows for minibatches: a tree of `[N, ...]`."""
        raise NotImplementedError

    def loss(self, params: Params, learner_state: LearnerState, batch: Batch) -> tuple[jax.Array, Logs]:
        """Raise NotImplementedError: this agent has a `minibatch_loss` instead."""
        raise NotImplementedError(
            f"{type(self).__name__} learns from minibatches: call minibatch_loss(params, learner_state, rows)."
        )

    def minibatch_loss(self, params: Params, learner_state: LearnerState, rows: Any) -> tuple[jax.Array, Logs]:
        """Return the loss of a minibatch of the rollout, and logs."""
        raise NotImplementedError

    def minibatch_gradients(self, params: Params, learner_state: LearnerState, rows: Any) -> tuple[Logs, Params]:
        """Return logs and gradients of `minibatch_loss`."""
        (loss, logs), grads = jax.value_and_grad(self.minibatch_loss, has_aux=True)(params, learner_state, rows)
        return {"loss": loss, **logs}, grads

    @property
    def stop_condition(self) -> Callable[[Logs], jax.Array] | None:
        """The argument `stops` of `MinibatchUpdates`."""
        return None

    def learner_step(
        self, params: Params, learner_state: LearnerState, batch: Batch
    ) -> tuple[Params, LearnerState, Logs]:
        """Do epochs of minibatch updates, each with `minibatch_gradients` and `apply_gradients`."""
        scheduled = current_values(self.cfg, lambda: learner_state.steps)
        params, after, logs = self._minibatch_updates(params, learner_state, batch)
        return params, after, {**logs, **scheduled}

    def make_optimizer(self) -> optax.GradientTransformation:
        """Return the optimizer. It gets all parameter arrays joined into one vector (see `MinibatchUpdates`)."""
        return optax.chain(optax.scale_by_adam(), descend_at_rate(self.cfg))

    def apply_gradients(self, params: Params, grads: Params, learner_state: LearnerState) -> tuple[Params, Any, Logs]:
        """Do one step of the optimizer, with the learning rate of this learner step."""
        updates, opt_state = self.optimizer.update(grads, learner_state.opt_state, params, steps=learner_state.steps)
        return optax.apply_updates(params, updates), opt_state, {}

    def check_num_envs(self, num_envs: int) -> None:
        self._minibatch_updates.check_rows(num_envs * self.cfg.unroll_length)

    @functools.cached_property
    def _minibatch_updates(self) -> MinibatchUpdates:
        cfg = self.cfg
        return MinibatchUpdates(
            self,
            self.rollout_and_logs,
            self.minibatch_gradients,
            cfg.num_epochs,
            cfg.num_minibatches,
            cfg.envs_per_batch,
            self.stop_condition,
        )


def _has_structure(params: Params) -> Callable[[Tree], bool]:
    """Return a predicate that is True for trees with the structure and shapes of the parameters."""
    structure, shapes = jax.tree.structure(params), list(map(np.shape, jax.tree.leaves(params)))

    def is_params(tree: Tree) -> bool:
        return jax.tree.structure(tree) == structure and list(map(np.shape, jax.tree.leaves(tree))) == shapes

    return is_params
