"""Checks of a config's numbers."""

from __future__ import annotations

import dataclasses
import math

import pytest

from rlframe.errors import UsageError, check_above, check_at_least, check_share


@dataclasses.dataclass
class Config:
    """Of a test."""

    steps: float | None = 1


@pytest.mark.parametrize("value", [1, 1.5, None])
def test_a_number_within_its_bounds_is_left_alone(value):
    check_at_least(Config(value), 1, "steps")
    check_above(Config(value), 0, "steps")


@pytest.mark.parametrize("value", [0, -1.0, math.nan])
def test_a_number_beyond_its_bound_is_named(value):
    with pytest.raises(UsageError, match=rf"^Config.steps must be at least 1, got {value}\.$"):
        check_at_least(Config(value), 1, "steps")
    with pytest.raises(UsageError, match=rf"^Config.steps must be above 0, got {value}\.$"):
        check_above(Config(value), 0, "steps")


@pytest.mark.parametrize("value", [0, 0.5, 1, None])
def test_a_share_is_left_alone(value):
    check_share(Config(value), "steps")


@pytest.mark.parametrize("value", [-0.1, 1.01, math.nan])
def test_a_number_that_is_no_share_is_named(value):
    with pytest.raises(UsageError, match=rf"^Config.steps must be in \[0, 1\], got {value}\.$"):
        check_share(Config(value), "steps")
