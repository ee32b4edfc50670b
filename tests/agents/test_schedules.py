"""Tests of schedules: values at several steps, functions, limits, and the agents that use them."""

from __future__ import annotations

import dataclasses
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlframe.agents import PPOConfig, SACConfig
from rlframe.agents.schedules import Scheduled, check_schedules, current, current_values, function_names, scheduled
from rlframe.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Config:
    rate: Scheduled = scheduled(0.5, above=0)
    epsilon: Scheduled = scheduled(0.0, at_most=1)
    other: Scheduled | None = scheduled(None)
    total_learner_steps: int | None = 100

    def __post_init__(self) -> None:
        check_schedules(self)


HALF = 0.5 - 0.5 * math.cos(0.3 * math.pi)  # weight of the end of a cosine after 0.3 of its time


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (0.5, {0: 0.5, 1000: 0.5}),
        ("constant:0.5", {0: 0.5, 1000: 0.5}),
        ("linear:0.4:0", {0: 0.4, 25: 0.3, 50: 0.2, 100: 0.0, 150: 0.0}),
        ("linear:1:0.2@0.5", {0: 1.0, 25: 0.6, 50: 0.2, 100: 0.2}),
        ("linear:1:0.2@40", {0: 1.0, 20: 0.6, 40: 0.2, 41: 0.2}),
        ("linear:0:0.4@20:0", {0: 0.0, 10: 0.2, 20: 0.4, 60: 0.2, 100: 0.0, 101: 0.0}),
        ("cosine:0.4:0", {0: 0.4, 30: 0.4 * (1 - HALF), 50: 0.2, 100: 0.0, 150: 0.0}),
        ("cosine:0.1:0.3@0.5", {0: 0.1, 15: 0.1 + 0.2 * HALF, 25: 0.2, 50: 0.3, 90: 0.3}),
        ("piecewise:0.4:0.2@0.5:0.1@80", {0: 0.4, 49: 0.4, 50: 0.2, 79: 0.2, 80: 0.1, 1000: 0.1}),
        (optax.linear_schedule(0.4, 0.2, 10), {0: 0.4, 5: 0.3, 10: 0.2, 20: 0.2}),
        (lambda step: 0.01 * (step + 1), {0: 0.01, 9: 0.1}),
    ],
)
def test_schedule_has_its_value_at_each_step(schedule, values):
    rate = jax.jit(lambda steps: current(Config(schedule), "rate", steps))
    for steps, expected in values.items():
        np.testing.assert_allclose(rate(jnp.int32(steps)), expected, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(rate(jnp.float32(steps)), expected, rtol=1e-6, atol=1e-9)
    assert rate(0).dtype == np.float32


def test_line_to_zero_has_the_same_bits_as_a_factor_that_falls_to_zero():
    steps = jnp.arange(390, dtype=jnp.float32)
    config = Config("linear:1e-3:0", total_learner_steps=389)
    values = jax.vmap(lambda step: current(config, "rate", step))(steps)
    np.testing.assert_array_equal(values, 1e-3 * jnp.maximum(1.0 - steps / 389, 0.0))


def test_share_of_a_run_of_unknown_length_is_refused_and_a_number_of_steps_is_not():
    with pytest.raises(UsageError, match=r"Config.rate depends on the length of the run.*Set total_learner_steps"):
        current(Config("linear:1:0", total_learner_steps=None), "rate", 3)
    assert current(Config("linear:1:0@10", total_learner_steps=None), "rate", 5) == 0.5


def test_time_after_the_end_of_a_shorter_run_is_refused():
    with pytest.raises(UsageError, match=r"in a run of 10 learner steps, the times .* do not increase: 0, 20, 10"):
        current(Config("linear:0:1@20:0", total_learner_steps=10), "rate", 0)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("lineer:1:0", r"Config.rate: 'lineer:1:0' is not a schedule\. Expected a number, .* Did you mean 'linear'\?"),
        ("1e-3", "'1e-3' is not a schedule"),
        ("", "'' is not a schedule"),
        ("linear", "linear takes two values or more, got 0"),
        ("linear:1", "linear takes two values or more, got 1"),
        ("constant:1:2", "constant takes one value, got 2"),
        ("piecewise:1:2", "each value after the first needs @TIME"),
        ("linear:1:2:3", "each value after the first needs @TIME"),
        ("linear:1@0.5:2", "the first value is the value at the start of the run"),
        ("linear:1:2@0.5:3@0.4", r"times must increase and be above 0, got 0\.5, 0\.4"),
        ("linear:1:2@0:3", "times must increase and be above 0, got 0, 1"),
        ("linear:1:x", "each part must be VALUE or VALUE@TIME, with finite numbers"),
        ("cosine:1:inf", "each part must be VALUE or VALUE@TIME, with finite numbers"),
        ("linear:1:-1", "Config.rate must be at least 0, got 'linear:1:-1'"),
        ("linear:0:0", "Config.rate must be above 0, got 'linear:0:0'"),
        (-1.0, r"Config.rate must be above 0, got -1\.0"),
        (None, "Config.rate must be a number, or a schedule such as"),
    ],
)
def test_invalid_schedule_is_refused(schedule, message):
    with pytest.raises(UsageError, match=message):
        Config(schedule)


def test_value_above_the_limit_is_refused_and_a_default_of_none_may_stay():
    with pytest.raises(UsageError, match=r"Config.epsilon must be in \[0, 1\], got 'linear:2:0'"):
        Config(epsilon="linear:2:0")
    assert Config().other is None and Config(other="linear:0:0").other == "linear:0:0"
    with pytest.raises(UsageError, match="PPOConfig.entropy_cost must be at least 0"):
        PPOConfig(entropy_cost=-0.1)
    assert SACConfig().critic_learning_rate is None


def test_function_must_return_one_number():
    with pytest.raises(UsageError, match=r"Config.rate must return one number .*, got shape \(2,\)"):
        current(Config(lambda step: jnp.ones(2)), "rate", 0)


def test_name_of_a_function_is_valid_but_a_script_cannot_use_it():
    config = Config("/tmp/my rates.py:rate", other="my_package.rates:rate")
    assert function_names(config) == {"rate": "/tmp/my rates.py:rate", "other": "my_package.rates:rate"}
    with pytest.raises(UsageError, match="the name of a function. In a script, set it to the function itself"):
        current(config, "rate", 0)


def test_logs_have_the_learning_rate_and_schedules_that_change():
    cfg = PPOConfig(clip_epsilon="cosine:0.2:0", entropy_cost="constant:0.1", total_learner_steps=10)
    logs = current_values(cfg, lambda: jnp.int32(5))
    assert set(logs) == {"learning_rate", "clip_epsilon"}
    np.testing.assert_allclose([logs["learning_rate"], logs["clip_epsilon"]], [3e-4, 0.1], rtol=1e-6)
    assert current_values(object(), lambda: 1 / 0) == {}


def test_config_with_schedules_can_be_pickled_and_compared():
    cfg = PPOConfig(learning_rate="cosine:1e-3:0")
    assert pickle.loads(pickle.dumps(cfg)) == cfg != PPOConfig(learning_rate="linear:1e-3:0")
