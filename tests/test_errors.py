"""Test the functions that check numbers in a config, and test that errors can be pickled."""

from __future__ import annotations

import dataclasses
import math
import pickle

import pytest

from rlframe.envs.layout import SpecMismatchError
from rlframe.errors import FieldError, RlframeError, UsageError, check_above, check_at_least, check_fraction
from rlframe.language.server.errors import RefusedError
from rlframe.trajectories.service.validation import InvalidGroupError


@dataclasses.dataclass
class Config:
    """A config with one field, which must be a number."""

    steps: float | None = 1


@pytest.mark.parametrize("value", [1, 1.5, None])
def test_number_within_its_bounds_is_accepted(value):
    check_at_least(Config(value), 1, "steps")
    check_above(Config(value), 0, "steps")


@pytest.mark.parametrize("value", [0, -1.0, math.nan])
def test_number_below_its_lower_bound_is_refused(value):
    with pytest.raises(UsageError, match=rf"^Config.steps must be at least 1, got {value}\.$"):
        check_at_least(Config(value), 1, "steps")
    with pytest.raises(UsageError, match=rf"^Config.steps must be above 0, got {value}\.$"):
        check_above(Config(value), 0, "steps")


@pytest.mark.parametrize("value", [0, 0.5, 1, None])
def test_fraction_is_accepted(value):
    check_fraction(Config(value), "steps")


@pytest.mark.parametrize("value", [-0.1, 1.01, math.nan])
def test_fraction_below_0_or_above_1_is_refused(value):
    with pytest.raises(UsageError, match=rf"^Config.steps must be in \[0, 1\], got {value}\.$"):
        check_fraction(Config(value), "steps")


@pytest.mark.parametrize(
    "error",
    [
        UsageError("no such agent"),
        FieldError("count must be a number", "count"),
        InvalidGroupError(("tokens", 0), "There is no token.", "too_short"),
        SpecMismatchError("observation", "2.0", "in [0, 1]", (0, 3)),
        RefusedError("Too many requests.", 429, code="busy", headers={"Retry-After": "2"}),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_error_keeps_its_attributes_when_it_is_pickled(error: RlframeError, protocol: int) -> None:
    again = pickle.loads(pickle.dumps(error, protocol))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
