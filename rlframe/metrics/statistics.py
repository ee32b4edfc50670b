"""What several seeds say together: interquartile means, and intervals by the bootstrap.

Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (arXiv:2108.13264): the mean
of the middle half of the runs is neither moved by one lucky run, as the mean is, nor as coarse as the median.
"""

from __future__ import annotations

from typing import Any

import numpy as np

CONFIDENCE = 0.95
ENOUGH = 4  # values; of fewer the middle half is all of them, and the interval goes from the lowest to the highest
_RESAMPLES = 2_000


def interquartile_mean(values: Any, axis: int = 0) -> np.ndarray:
    """The mean of the middle half of `values` [n, ...] along `axis`; of fewer than ENOUGH the mean of all."""
    from scipy import stats

    return np.asarray(stats.trim_mean(values, 0.25, axis=axis))


def interval(values: Any) -> tuple[np.ndarray, np.ndarray]:
    """(low [...], high [...]): where the interquartile mean of `values` [n, ...] lies, with 95% confidence.

    By the percentile bootstrap over the n runs. Of fewer than ENOUGH, which are too few for such a statement, it is the
    lowest and the highest. The same for the same values.
    """
    values = np.asarray(values, np.float64)
    if len(values) < ENOUGH:
        return values.min(axis=0), values.max(axis=0)
    drawn = np.random.default_rng(0).integers(len(values), size=(_RESAMPLES, len(values)))
    # In parts: all resamples of many long curves at once are gigabytes.
    means = np.concatenate([interquartile_mean(values[part], axis=1) for part in np.array_split(drawn, 100)])
    tail = 50.0 * (1.0 - CONFIDENCE)
    low, high = np.percentile(means, [tail, 100.0 - tail], axis=0)
    return low, high


def plus_minus(std: float | None, count: int) -> str:
    """Return " ± std", or nothing for a single value, which has no spread."""
    return f" ± {std:.1f}" if std is not None and count > 1 else ""
