"""Rounds end at their limits, and their results do not depend on where the calls end."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from rlframe.device.driver import CompiledRounds, FusedDriver, SingleRun, state_of
from rlframe.device.rounds import CallLimits, Start
from rlframe.device.seeds import run_rounds
from rlframe.envs.jax_pool import env_keys
from rlframe.learners import Learner, LearnerConfig
from rlframe.learners.update import copy_arrays
from rlframe.programs.options.make_experiment import fill_configs
from rlframe.programs.topologies.makers import make_agent, make_jax_envs
from rlframe.sharding import LearnerDevices
from tests.programs.test_fused import SMALL, experiment

MANY = 10**6
NUM_ENVS = 4
# About the first ten rounds have no updates. Each later round has about 4.
DQN = {"batch_size": 16, "min_replay_size": 40, "n_step": 1, "update_period": 1, **SMALL}


class Made:
    """The jitted functions of an agent, and the state before its first round."""

    def __init__(self, agent="dqn", **options):
        values = fill_configs(experiment(agent, **{**DQN, **options}))
        self.agent = make_agent(values)
        self.compiled = CompiledRounds(self.agent, make_jax_envs(values), NUM_ENVS, None, LearnerDevices())
        self.learner = Learner(LearnerConfig(seed=3), self.agent, None)
        self.start = Start(jax.random.PRNGKey(3), *self.learner.state, env_keys(5, NUM_ENVS))
        self.carry = self.compiled.init(*self.start)

    def run(self, carry, rounds=MANY, env_steps=MANY, updates=MANY, enough_updates=MANY):
        limits = CallLimits(*np.array([rounds, env_steps, updates, enough_updates], np.int32))
        return self.compiled.run(copy_arrays(carry), limits)


@pytest.fixture(scope="module")
def made() -> Made:
    return Made()


def assert_equal(carry, other) -> None:
    """Check that two carries are equal, except for their tallies."""
    one, two = (jax.tree.leaves(each._replace(tally=())) for each in (carry, other))
    for leaf, expected in zip(one, two, strict=True):
        np.testing.assert_array_equal(leaf, expected)


def test_call_that_ends_between_two_updates_is_continued_exactly(made):
    is_ready = made.compiled.rounds.replay.is_ready
    first = made.run(made.carry, enough_updates=1)  # the call ends with the round of the first update
    rounds, updates = int(first.tally.rounds), int(first.tally.updates)
    assert rounds > 9 and updates > 0 and not is_ready(first.replay)
    cut = made.run(first, updates=2)  # of 3 or 4
    assert (cut.tally.updates, cut.tally.rounds) == (2, 1) and is_ready(cut.replay)
    more = made.run(cut, updates=1)
    assert (more.tally.updates, more.tally.rounds) == (1, 0), "The updates that are due come before new steps."
    assert_equal(made.run(more, rounds=2), made.run(made.carry, rounds=rounds + 3))


def test_actions_and_draws_have_different_keys(made):
    numbers = np.arange(10_000, dtype=np.uint32)
    keys = [
        set(map(tuple, np.asarray(jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)).tolist()))
        for key in (made.carry.rng, made.carry.replay_rng)
    ]
    assert not keys[0] & keys[1]
    assert tuple(made.carry.replay_rng.tolist()) not in keys[0]


def test_arrays_of_the_first_carry_can_be_donated(made):
    arrays = jax.tree.leaves((made.carry, made.learner.state))
    assert len({array.unsafe_buffer_pointer() for array in arrays}) == len(arrays)


def test_restored_run_equals_the_saved_one(made):
    carry = made.run(made.carry, updates=3)
    saved = [np.array(leaf) for leaf in jax.tree.leaves(state_of(carry))]
    restored = made.compiled.restore(made.start, saved)
    assert not saved, "The saved replay must not stay in memory."
    assert_equal(restored._replace(params=carry.params, learner_state=carry.learner_state, logs=carry.logs), carry)


def test_first_updates_end_a_long_call(made):
    run = SingleRun(made.compiled, made.start, None)
    assert run.run(MANY, MANY).tally.rounds == 1
    run._length.count = MANY  # as after many short rounds without updates
    tally, expected = run.run(MANY, MANY).tally, made.run(made.carry, enough_updates=1).tally
    assert (tally.updates, tally.rounds) == (expected.updates, expected.rounds - 1)
    assert run._length.count == 1


def test_limit_of_updates_can_be_larger_than_32_bits(made):
    driver = FusedDriver(made.agent, made.learner, SingleRun(made.compiled, made.start, None), 2**31 + 5)
    driver.advance(float("inf"), lambda: False)
    assert driver.env_steps == NUM_ENVS
    assert not driver.has_replay


@pytest.mark.system
def test_seed_that_has_ended_is_ignored_and_a_call_without_seeds_ends(made):
    carry = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), made.carry)
    run = jax.jit(lambda *args: run_rounds(made.compiled.rounds, *args))

    def limits(*rows):
        return CallLimits(*np.array(rows, np.int32).T)

    ended, active = (0, 0, 0, MANY), (15, MANY, MANY, MANY)
    result = run(carry, limits(active, ended), np.array([True, False]))
    expected = made.run(made.carry, rounds=15)
    assert result.tally.rounds.tolist() == [15, 15]
    assert result.tally.updates.tolist() == [expected.tally.updates, 0] and expected.tally.updates > 3
    for leaf, other in zip(jax.tree.leaves(result.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(leaf[0], other, atol=1e-5)
    assert run(carry, limits(ended, ended), np.array([False, False])).tally.rounds.tolist() == [0, 0]
    # A session that has reached its number of updates makes no round.
    assert run(carry, limits((9, MANY, 0, MANY), ended), np.array([True, False])).tally.rounds.tolist() == [0, 0]
