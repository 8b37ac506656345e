"""How sure a figure is: intervals and paired tests, with scipy. Nothing here knows what the figures mean.

The unit of all of them is the question (or the trained drafter): its turns and sampling seeds are pooled before, since
they are not independent of each other.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean of `count` values, their standard deviation (n - 1), and the t interval of the mean at 95%.

    Deviation and interval are None for fewer than two values, the mean for none.
    """

    mean: float | None
    deviation: float | None
    low: float | None
    high: float | None
    count: int


def spread(values: Sequence[float]) -> Spread:
    """See `Spread`."""
    values = np.asarray(values, float)
    count = len(values)
    if count < 2:
        return Spread(float(values[0]) if count else None, None, None, None, count)
    mean, deviation = float(values.mean()), float(values.std(ddof=1))
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, count - 1)) * deviation / math.sqrt(count)
    return Spread(mean, deviation, mean - half, mean + half, count)


def interval(statistic: Callable[..., np.ndarray], *samples: Sequence[float]) -> tuple[float, float] | None:
    """Bootstrap interval (percentiles, 95%) of a figure that is made of sums over questions, such as a ratio.

    `samples`: arrays [n] that belong together; `statistic(*arrays, axis)` reduces `axis`. The resampling is seeded, so
    the same data has the same interval. None for fewer than two questions.
    """
    if len(samples[0]) < 2:
        return None
    arrays = tuple(np.asarray(sample, float) for sample in samples)
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # all alike: the interval is a point
        result = stats.bootstrap(
            arrays,
            statistic,
            n_resamples=RESAMPLES,
            paired=True,
            vectorized=True,
            confidence_level=CONFIDENCE,
            method="percentile",
            rng=np.random.default_rng(0),
        )
    low, high = map(float, result.confidence_interval)
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def ratio(numerators: np.ndarray, denominators: np.ndarray, axis: int = -1) -> np.ndarray:
    """Sum over sum, as a `statistic` of `interval`."""
    return numerators.sum(axis=axis) / denominators.sum(axis=axis)


def ratio_of_ratios(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray, axis: int = -1) -> np.ndarray:
    """(a / b) / (c / d) of sums, as a `statistic` of `interval`: a speed-up."""
    return ratio(a, b, axis) / ratio(c, d, axis)


@dataclasses.dataclass(frozen=True)
class PairedTest:
    """Differences of pairs, second minus first: their mean, its 95% interval, the two-sided p of a paired t-test.

    p and interval are None where the test says nothing: fewer than two pairs, or all differences alike and not zero.
    """

    difference: float | None
    low: float | None
    high: float | None
    p: float | None
    count: int


def paired_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """See `PairedTest`. Raises ValueError if the two have different lengths."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values are no pairs")
    differences = np.asarray(second, float) - np.asarray(first, float)
    count = len(differences)
    if count < 2:
        return PairedTest(float(differences[0]) if count else None, None, None, None, count)
    mean = float(differences.mean())
    if np.ptp(differences) == 0:
        sure = mean == 0  # the two never differ
        return PairedTest(mean, *((0.0, 0.0, 1.0) if sure else (None, None, None)), count)
    result = stats.ttest_rel(second, first)
    low, high = result.confidence_interval(CONFIDENCE)
    return PairedTest(mean, float(low), float(high), float(result.pvalue), count)


def adjusted(p_values: Sequence[float | None]) -> list[float | None]:
    """p values corrected for how many they are (Benjamini and Hochberg); None stays None."""
    known = [p for p in p_values if p is not None]
    corrected = iter(stats.false_discovery_control(known) if known else ())
    return [None if p is None else float(next(corrected)) for p in p_values]
