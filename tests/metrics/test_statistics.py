"""Interquartile means by hand and as rliable has them, and what the bootstrap says of them."""

from __future__ import annotations

import numpy as np
import pytest

from rlframe.metrics.statistics import interquartile_mean, interval


def test_the_interquartile_mean_is_that_of_the_middle_half():
    assert interquartile_mean([1000.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -50.0]) == 3.5
    assert interquartile_mean([1.0, 2.0, 6.0]) == 3.0  # of three there is no half to leave out
    np.testing.assert_array_equal(interquartile_mean([[0.0, 1.0], [5.0, 1.0], [7.0, 3.0], [90.0, 9.0]]), [6.0, 2.0])


def test_the_interval_is_that_of_all_resamples():
    assert [float(end) for end in interval([0.0, 10.0, 4.0])] == [0.0, 10.0]  # too few
    values = np.array([0.0, 1.3, 2.1, 4.7, 9.9])
    each = np.stack(np.meshgrid(*[values] * 5)).reshape(5, -1)  # all 3,125 resamples
    wanted = np.percentile(interquartile_mean(each), [2.5, 97.5])
    np.testing.assert_allclose(interval(values), wanted, atol=0.4)
    assert interval([7.0]) == (7.0, 7.0)


SCORES = [500.0, 481.5, 403.25, 352.5, 500.0, 429.75, 366.0, 12.0, 478.5, 455.0, 500.0]


@pytest.mark.parametrize(
    ("count", "wanted"), [(4, 442.375), (5, 461.583333), (7, 436.1), (8, 420.125), (11, 444.857143)]
)
def test_interquartile_means_are_those_of_rliable(count, wanted):
    # rliable 1.2.0: metrics.aggregate_iqm(scores[:, None]).
    assert interquartile_mean(SCORES[:count]) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(("count", "wanted"), [(5, (369.4, 500.0)), (8, (283.4, 486.1))])
def test_intervals_are_those_of_rliable(count, wanted):
    # rliable 1.2.0: library.get_interval_estimates with aggregate_iqm and 50,000 resamples.
    assert np.array(interval(SCORES[:count])) == pytest.approx(wanted, abs=8.0)


def test_an_interval_of_curves_is_that_of_each_point():
    curves = np.random.RandomState(0).randn(6, 3)
    low, high = interval(curves)
    for i in range(3):
        np.testing.assert_allclose([low[i], high[i]], interval(curves[:, i]))
