"""95% intervals of shares and of ratios of shares.

Wilson, k of n:  (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n),  p = k/n, z = 1.96
t, runs x_1..x_r:  mean -+ t(0.975, r-1) s / sqrt(r)
paired ratio:  both policies played the same traces, which are cut into blocks of arrival
    time; blocks are drawn with replacement within each trace, the same ones for both, and
    R = (sum met_a / sum n_a) / (sum met_b / sum n_b) is taken each time; the interval is its
    2.5% to 97.5% quantile. Blocks, because neighbours in a queue share their fate.
quantile, pooled over runs: the same drawing of blocks within each run, the quantile each time
quantile of a repetition, from one run of n blocks: q exp(-+ t(0.975, n-1) sqrt(2) s); s: standard
    deviation of log q over the same drawings, times sqrt(n/(n-1)). Both runs are off by s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from horizonserve.bench.metrics import Attainment

Interval = tuple[float, float]

_Z: Final = 1.959964
#: Student's t, 0.975, for 1 to 30 degrees of freedom; beyond that the normal's.
_T: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def wilson(successes: int, trials: int) -> Interval:
    """Of a share, for independent trials; (0, 1) without any."""
    if trials == 0:
        return 0.0, 1.0
    share, z2 = successes / trials, _Z * _Z
    middle = share + z2 / (2 * trials)
    half = _Z * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials))
    scale = 1 + z2 / trials
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def t_interval(values: Sequence[float]) -> Interval:
    """Of the mean of shares of independent runs, kept within 0 and 1.

    Raises:
        ValueError: fewer than two runs have no spread.
    """
    low, high = mean_interval(values)
    return max(0.0, low), min(1.0, high)


def mean_interval(values: Sequence[float]) -> Interval:
    """Of the mean of independent values of any size.

    Raises:
        ValueError: fewer than two values have no spread.
    """
    count = len(values)
    if count < 2:
        raise ValueError(f"t interval: {count} runs; give at least 2")
    mean = math.fsum(values) / count
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = _t(count) * spread / math.sqrt(count)
    return mean - half, mean + half


def _t(count: int) -> float:
    """Student's t, 0.975, of so many values."""
    return _T[count - 2] if count - 2 < len(_T) else _Z


Blocks = Mapping[int, "Attainment"]


def paired_ratio(
    traces: Sequence[tuple[Blocks, Blocks]], draws: int = 4_000, seed: int = 0
) -> tuple[float, Interval]:
    """The ratio of attainments a : b over the same traces, and its interval.

    Each trace gives the blocks of a and those of b. Infinity where b kept no promise and a did,
    nan where neither did.
    """
    rng = np.random.default_rng(seed)
    sums = np.zeros((draws, 4))
    exact = np.zeros(4)
    for of_a, of_b in traces:
        names = sorted(of_a.keys() | of_b.keys())
        table = np.array([[*_pair(of_a, name), *_pair(of_b, name)] for name in names], float)
        if len(names):
            exact += table.sum(axis=0)
            sums += table[rng.integers(len(names), size=(draws, len(names)))].sum(axis=1)
    ratios = _ratio(sums)
    ratios = np.sort(ratios[~np.isnan(ratios)])
    point = float(_ratio(exact[None, :])[0])
    if not len(ratios):
        return point, (math.nan, math.nan)
    # Nearest ranks: interpolating between a number and infinity has no meaning.
    low, high = (ratios[round(q * (len(ratios) - 1))] for q in (0.025, 0.975))
    return point, (float(low), float(high))


def block_quantile(
    runs: Sequence[Sequence[Sequence[float]]], q: float, draws: int = 1_000, seed: int = 0
) -> Interval | None:
    """Interval of the quantile ``q`` of all values of all runs, each a list of blocks of values.

    None without a value.
    """
    found = _drawn_quantiles(runs, q, draws, seed)
    if not found:
        return None
    low, high = np.quantile(found, (0.025, 0.975))
    return float(low), float(high)


def repeated_quantile(
    blocks: Sequence[Sequence[float]], q: float, draws: int = 1_000, seed: int = 0
) -> Interval | None:
    """Where the quantile ``q`` of another run like this one falls; values above 0, in blocks.

    None with fewer than two blocks.
    """
    count = len(blocks)
    if count < 2:
        return None
    logs = np.log(_drawn_quantiles([blocks], q, draws, seed))
    off = float(np.std(logs)) * math.sqrt(count / (count - 1))
    half = _t(count) * math.sqrt(2) * off
    middle = float(np.quantile(np.concatenate([np.array(block, float) for block in blocks]), q))
    return middle * math.exp(-half), middle * math.exp(half)


def _drawn_quantiles(
    runs: Sequence[Sequence[Sequence[float]]], q: float, draws: int, seed: int
) -> list[float]:
    """The quantile of all runs' values, each time with other blocks; empty without a value."""
    rng = np.random.default_rng(seed)
    arrays = [[np.array(block, float) for block in blocks] for blocks in runs if blocks]
    found = []
    for _ in range(draws if arrays else 0):
        drawn = np.concatenate(
            [
                blocks[index]
                for blocks in arrays
                for index in rng.integers(len(blocks), size=len(blocks))
            ]
        )
        if drawn.size:
            found.append(float(np.quantile(drawn, q)))
    return found


def _pair(blocks: Blocks, name: int) -> tuple[int, int]:
    block = blocks.get(name)
    return (block.met, block.decided) if block else (0, 0)


def _ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])
