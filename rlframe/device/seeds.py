"""Several seeds in the topology `fused`, in one process.

Each run has its own thread, `TrainingLoop` and `FusedDriver`, so it writes the same files as a single run. All runs use
the same compiled functions.

On an accelerator, the rounds of all runs are one vmapped, jitted call. A call of `JointRun.run` waits until all runs
that have not ended have called it. Then one thread makes the call for all:

    thread of seed 1: FusedDriver.advance -> JointRun.run ─┐
    thread of seed 2: FusedDriver.advance -> JointRun.run ─┼─ JointSeeds: `run_rounds`, in one call
    thread of seed 3: FusedDriver.advance -> JointRun.run ─┘

The call ends at the first end of a round at which a run has reached a limit, so each run makes the rounds of a single
run with its seed.

On a CPU, each run makes its own calls (`SingleRun`), at the same time as the others.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlframe import compilation
from rlframe.device.driver import (
    CallLength,
    CallResult,
    CompiledRounds,
    DeviceRun,
    SingleRun,
    num_bytes,
    state_of,
    with_state,
)
from rlframe.device.evaluation import EvaluationProgram
from rlframe.device.rounds import CallLimits, Carry, Parts, Rounds, Start, make_rounds, no_tally
from rlframe.types import Tree


class JointCall:
    """A function that several threads call together: it runs once, with the arguments of all of them.

    Args:
        members: names of the threads.
    """

    def __init__(self, members: Iterable[Hashable]) -> None:
        self._members = set(members)
        self._arguments: dict[Any, Any] = {}
        self._results: dict[Any, Any] = {}
        self._changed = threading.Condition()

    def __call__(self, member: Hashable, argument: Any, function: Callable[[dict[Any, Any]], dict[Any, Any]]) -> Any:
        """Wait until all members have called. Then one of them calls `function` with member -> argument.

        Returns:
            The member's value in the result of `function`. If `function` raises, all members raise its exception.
        """
        with self._changed:
            self._arguments[member] = argument
            while member in self._arguments:
                if len(self._arguments) < len(self._members):
                    self._changed.wait()
                    continue
                arguments, self._arguments = self._arguments, {}
                try:
                    self._results = function(arguments)
                except BaseException as error:
                    self._results = dict.fromkeys(arguments, error)
                self._changed.notify_all()
            result = self._results.pop(member)
        if isinstance(result, BaseException):
            raise result
        return result

    def leave(self, member: Hashable) -> None:
        """Remove a member, so that the others do not wait for it. Its own thread must call this."""
        with self._changed:
            self._members.discard(member)
            self._changed.notify_all()


class _Joining(NamedTuple):
    """The arguments of `JointSeeds.join`."""

    compiled: CompiledRounds
    start: Start
    restored: list[np.ndarray] | None


class JointSeeds:
    """The runs that share jitted functions, and on an accelerator make their rounds in one call.

    The thread of each run calls `join`. It must call `leave` when the run ends, in any way.

    Args:
        seeds: the seeds of all runs.
    """

    def __init__(self, seeds: Iterable[int]) -> None:
        self._joint = JointCall(seeds)
        self._length = CallLength()
        self._rows: dict[int, int] = {}  # seed -> row in all arrays
        self.leave = self._joint.leave
        self._sharing = threading.Lock()
        self._evaluation: EvaluationProgram | None = None

    def share(self, make: Callable[[], EvaluationProgram]) -> EvaluationProgram:
        """Return the result of the first call of `make`, so that all runs use one jitted function in evaluations."""
        with self._sharing:
            if self._evaluation is None:
                self._evaluation = make()
            return self._evaluation

    def join(self, seed: int, compiled: CompiledRounds, start: Start, restored: list[np.ndarray] | None) -> DeviceRun:
        """Wait for the other runs. Then make the state of all runs on the device, and return the one of this run.

        Args:
            seed: seed of the run.
            compiled: the jitted functions. All runs must have equal agents, environments and options.
            start: see `SingleRun`.
            restored: see `SingleRun`.

        Raises:
            UsageError: the replays do not fit into memory.
        """
        return self._joint(seed, _Joining(compiled, start, restored), self._start)

    def run(self, seed: int, env_steps: int, updates: int) -> CallResult:
        """See `DeviceRun.run`."""
        return self._joint(seed, (env_steps, updates), self._run_all)

    def get_state(self, seed: int) -> list[np.ndarray]:
        """See `DeviceRun.get_state`."""
        leaves = self._row(jax.tree.leaves(state_of(self._carry)), self._rows[seed])
        return jax.tree.map(np.asarray, leaves)

    def replay_stats(self, seed: int) -> dict[str, int]:
        """See `DeviceRun.replay_stats`."""
        replay = self._carry.replay
        return {"items": int(replay.size[self._rows[seed]]), "bytes": num_bytes(replay) // len(self._rows)}

    def _start(self, joined: dict[int, _Joining]) -> dict[int, DeviceRun]:
        compiled, start, _ = next(iter(joined.values()))
        joins = _is_vmapped() and not compiled.in_parts
        num_restored = sum(each.restored is not None for each in joined.values())
        compiled.check_memory(start, runs=len(joined), restored=num_restored, joins=joins)
        if not joins:
            return {seed: SingleRun(compiled, start, restored) for seed, (_, start, restored) in joined.items()}
        self._rows = {seed: row for row, seed in enumerate(joined)}
        starts = jax.tree.map(lambda *leaves: np.stack(leaves), *(each.start for each in joined.values()))
        init = compilation.jit(jax.vmap(compiled.rounds.init), differentiates=False)
        self._carry: Carry = init(*starts)
        put = compilation.jit(_put, donate_argnums=(0,), differentiates=False)
        for seed, (_, _, saved) in joined.items():
            if saved is not None:
                self._carry = put(self._carry, self._rows[seed], saved)
                saved.clear()  # see `SingleRun`
        run = functools.partial(run_rounds, compiled.rounds)
        self._run = compilation.jit(run, donate_argnums=(0,), differentiates=True)
        self._row = compilation.jit(_row, differentiates=False)
        self._split = compilation.jit(functools.partial(_split, len(joined)), differentiates=False)
        return {seed: JointRun(self, seed) for seed in joined}

    def _run_all(self, limits: dict[int, tuple[int, int]]) -> dict[int, CallResult]:
        began, length = time.perf_counter(), self._length
        rows = [(length.count, *limits.get(seed, (0, 0)), length.enough_updates) for seed in self._rows]
        is_active = np.array([seed in limits for seed in self._rows])
        self._carry = carry = self._run(self._carry, CallLimits(*np.array(rows, np.int32).T), is_active)
        tally, logs = jax.device_get((carry.tally, carry.logs))
        length.choose(int(tally.rounds[0]), time.perf_counter() - began, int(tally.updates.max()))
        learned, results = self._split((carry.params, carry.learner_state)), {}
        for seed in limits:
            row = self._rows[seed]
            results[seed] = CallResult(*learned[row], *_row((tally, logs), row))
        return results


class JointRun:
    """One run of a `JointSeeds`. See `DeviceRun`."""

    def __init__(self, group: JointSeeds, seed: int) -> None:
        self._group, self._seed = group, seed

    def run(self, env_steps: int, updates: int) -> CallResult:
        """See `DeviceRun`. Wait for the other runs."""
        return self._group.run(self._seed, env_steps, updates)

    def get_state(self) -> list[np.ndarray]:
        """See `DeviceRun`."""
        return self._group.get_state(self._seed)

    def replay_stats(self) -> dict[str, int]:
        """See `DeviceRun`."""
        return self._group.replay_stats(self._seed)

    def close(self) -> None:
        """See `DeviceRun`. The other runs continue."""
        self._group.leave(self._seed)


def run_rounds(rounds: Rounds, carry: Carry, limits: CallLimits, is_active: jax.Array) -> Carry:
    """Make rounds of S seeds until one of them reaches a limit. All arrays are [S, ...].

    A seed whose `is_active` is False has ended, and its limits are 0. It makes steps, but ends no call and does no
    updates that are not part of every round.
    """

    def is_within(carry: Carry) -> jax.Array:
        return (jax.vmap(rounds.is_within)(carry, limits) | ~is_active).all() & is_active.any()

    def may_learn(carry: Carry) -> jax.Array:
        return jax.vmap(rounds.may_learn)(carry, limits).any()

    def learn_if_due(carry: Carry, limits: CallLimits) -> Carry:
        is_due, learned = rounds.may_learn(carry, limits), rounds.learn(carry)
        # An update does not change the steps in a replay, so they are not copied.
        return jax.tree.map(lambda old, new: old if new is old else jnp.where(is_due, new, old), carry, learned)

    def learn(carry: Carry) -> Carry:
        if rounds.replay.updates_per_round == "one":  # an update is due in all seeds
            return jax.vmap(rounds.learn)(carry)
        return jax.vmap(learn_if_due)(carry, limits)

    tally = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, is_active.shape), no_tally())
    parts = Parts(is_within, may_learn, jax.vmap(rounds.collect), learn)
    return make_rounds(carry._replace(tally=tally), parts, rounds.replay.updates_per_round)


def _is_vmapped() -> bool:
    """Return False on a CPU.

    There, one vmapped call takes more processor time than a call for each seed, and uses fewer cores (see
    docs/understand/fused.md). A vmapped convolution has other weights for each seed, which is much slower.
    """
    return jax.default_backend() != "cpu"


def _put(carry: Carry, row: int, leaves: list[np.ndarray]) -> Carry:
    """Return the carry [S, ...] with the saved state of one seed in a row."""
    state = jax.tree.leaves(state_of(carry))
    return with_state(carry, [rows.at[row].set(leaf) for rows, leaf in zip(state, leaves, strict=True)])


def _row(tree: Tree, row: Any) -> Tree:
    return jax.tree.map(lambda leaf: leaf[row], tree)


def _split(count: int, tree: Tree) -> list[Tree]:
    return [_row(tree, row) for row in range(count)]
