"""Tests of the texts of numbers."""

from __future__ import annotations

import math

import pytest

from rlframe.metrics.terminal import format_number, plus_minus


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0"), (0.8934, "0.893"), (-0.02, "-0.0200"), (9.0, "9.00"), (28.51, "28.5"), (99.96, "100.0"), (None, "-")]
    + [
        (500.0, "500.0"),
        (-1234.56, "-1,234.6"),
        (1e-9, "1.00e-09"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (None, "-"),
    ],
)
def test_numbers_have_three_significant_digits_or_one_decimal(value, text):
    assert format_number(value) == text


def test_a_single_value_has_no_standard_deviation():
    assert (plus_minus(0.0312, 2), plus_minus(0.0312, 1), plus_minus(None, 3)) == (" ± 0.0312", "", "")
