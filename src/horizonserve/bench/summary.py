"""Figures of an experiment from its runs: rows for tables, CSV and JSON."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any, Final

from horizonserve.bench.intervals import Interval, block_quantile, paired_ratio, t_interval
from horizonserve.bench.metrics import (
    Attainment,
    ClassReport,
    Promise,
    attainment,
    blocks,
    by_block,
    class_report,
    firsts_s,
    report,
)
from horizonserve.bench.result import Result
from horizonserve.bench.store import Run
from horizonserve.slo import Output, RequestClass

#: Neighbours in a queue share their fate; arrivals of so many seconds are resampled together.
BLOCK_S: Final = 10.0
ALL: Final = "all"


@dataclass(frozen=True, slots=True)
class Row:
    """One class (or all) under one arm, over all its runs."""

    experiment: str
    rate_rps: float
    arm: str
    request_class: str
    runs: int
    requests: int
    #: First response. Mean over the runs; the interval is t over runs, or Wilson for a single run.
    attainment: float | None
    attainment_low: float
    attainment_high: float
    #: First response and every token, likewise.
    both: float | None
    both_low: float
    both_high: float
    #: The same for one who reads from the first token on.
    at_once: float | None
    at_once_low: float
    at_once_high: float
    completed_attainment: float | None
    failed: int
    timed_out: int
    undecided: int
    first_p50_s: float | None
    first_p95_s: float | None
    #: Bootstrap over blocks of arrivals.
    first_p95_low_s: float | None
    first_p95_high_s: float | None
    tpot_p50_ms: float | None
    tpot_p95_ms: float | None
    gap_p95_ms: float | None
    slo_ms: float | None
    tbt_ms: float | None


@dataclass(frozen=True, slots=True)
class Ratio:
    """Attainment of one arm over another's on the same traces."""

    promise: Promise
    experiment: str
    rate_rps: float
    arm: str
    over: str
    ratio: float
    low: float
    high: float


def rows(runs: Sequence[Run]) -> list[Row]:
    """All classes first, then each, for every arm in the order of its first run."""
    result: list[Row] = []
    for arm, of_arm in _by_arm(runs).items():
        classes: list[RequestClass | None] = [None]
        for run in of_arm:
            classes += [name for name in report(run.results, run.targets) if name not in classes]
        result += [_row(arm, name, of_arm) for name in classes]
    return result


def ratios(
    runs: Sequence[Run], of: str, over: str, promise: Promise = Promise.FIRST
) -> Ratio | None:
    """The paired ratio of two arms; None where they share no trace."""
    arms = _by_arm(runs)
    a, b = ({run.head["seed"]: run for run in arms.get(name, [])} for name in (of, over))
    seeds = [seed for seed in a if seed in b]
    if not seeds:
        return None
    traces = [(_blocks(a[seed], promise), _blocks(b[seed], promise)) for seed in seeds]
    ratio, (low, high) = paired_ratio(traces)
    head = a[seeds[0]].head
    return Ratio(promise, head["experiment"], head["rate_rps"], of, over, ratio, low, high)


def _blocks(run: Run, promise: Promise) -> dict[int, Attainment]:
    return by_block(run.results, run.targets, BLOCK_S, promise)


def _by_arm(runs: Iterable[Run]) -> dict[str, list[Run]]:
    arms: dict[str, list[Run]] = {}
    for run in runs:
        arms.setdefault(run.head["arm"], []).append(run)
    return arms


def _of(run: Run, name: RequestClass | None) -> list[Result]:
    return [r for r in run.results if name is None or r.request_class is name]


def _row(arm: str, name: RequestClass | None, runs: Sequence[Run]) -> Row:
    targets = runs[0].targets
    together: ClassReport = class_report([r for run in runs for r in _of(run, name)], targets)
    first, first_interval = _mean(runs, name, Promise.FIRST, together.attainment)
    both, both_interval = _mean(runs, name, Promise.BOTH, together.both)
    at_once, at_once_interval = _mean(runs, name, Promise.AT_ONCE, together.at_once)
    p95_interval = _p95_interval(runs, name) or (None, None)
    is_text = name is not None and name.output is Output.TEXT
    return Row(
        experiment=runs[0].head["experiment"],
        rate_rps=runs[0].head["rate_rps"],
        arm=arm,
        request_class=name.value if name else ALL,
        runs=len(runs),
        requests=sum(len(_of(run, name)) for run in runs),
        attainment=first,
        attainment_low=first_interval[0],
        attainment_high=first_interval[1],
        both=both,
        both_low=both_interval[0],
        both_high=both_interval[1],
        at_once=at_once,
        at_once_low=at_once_interval[0],
        at_once_high=at_once_interval[1],
        completed_attainment=together.completed.value,
        failed=together.failed,
        timed_out=together.timed_out,
        undecided=together.undecided,
        first_p50_s=together.first_p50_s,
        first_p95_s=together.first_p95_s,
        first_p95_low_s=p95_interval[0],
        first_p95_high_s=p95_interval[1],
        tpot_p50_ms=_ms(together.tpot_p50_s),
        tpot_p95_ms=_ms(together.tpot_p95_s),
        gap_p95_ms=_ms(together.gap_p95_s),
        slo_ms=_ms(targets.slo_s[name]) if name else None,
        tbt_ms=_ms(targets.tbt_s) if is_text else None,
    )


def _mean(
    runs: Sequence[Run], name: RequestClass | None, promise: Promise, together: Attainment
) -> tuple[float | None, Interval]:
    each = [attainment(_of(run, name), run.targets, promise) for run in runs]
    shares = [one.value for one in each if one.value is not None]
    if len(shares) > 1:
        return math.fsum(shares) / len(shares), t_interval(shares)
    return together.value, together.interval


def _p95_interval(runs: Sequence[Run], name: RequestClass | None) -> Interval | None:
    of_runs = [
        [firsts_s(block, run.targets) for block in blocks(_of(run, name), BLOCK_S).values()]
        for run in runs
    ]
    return block_quantile(of_runs, 0.95)


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * 1_000


def to_csv(table: Sequence[Row]) -> str:
    """The rows with a header line."""
    out = StringIO()
    writer = csv.DictWriter(out, list(Row.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in table)
    return out.getvalue()


def to_json(table: Sequence[Row], against: Sequence[Ratio], facts: dict[str, Any]) -> str:
    """Rows, ratios and what they were measured on. Infinite or undefined ratios become null."""

    def finite(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    content = {
        **facts,
        "rows": [asdict(row) for row in table],
        "ratios": [{k: finite(v) for k, v in asdict(one).items()} for one in against],
    }
    return json.dumps(content, indent=2, allow_nan=False) + "\n"
