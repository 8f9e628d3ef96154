"""The tables a person reads."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from horizonserve.bench.summary import ALL, Ratio, Row

KIND = "measured on CPU engine"


def table(rows: Sequence[Row], title: str, kind: str = KIND) -> Table:
    """One block per arm: all classes, then each."""
    result = Table(title=f"{title}\n[dim]{kind}[/dim]", title_justify="left")
    result.add_column("policy", no_wrap=True)
    result.add_column("class", no_wrap=True)
    for name in (
        "n",
        "SLO s",
        "attainment, 95%",
        "of completed",
        "first p50 s",
        "p95 s",
        "TPOT p50 ms",
        "p95 ms",
        "failed",
    ):
        result.add_column(name, justify="right", no_wrap=name.startswith("attainment"))
    for index, row in enumerate(rows):
        is_last = index + 1 == len(rows) or rows[index + 1].arm != row.arm
        whole = row.request_class == ALL
        result.add_row(
            row.arm if whole else "",
            row.request_class,
            str(row.requests),
            _number(None if row.slo_ms is None else row.slo_ms / 1_000, 2),
            _share(row),
            _number(row.completed_attainment, 2),
            # One figure over classes that differ by an order of magnitude would mislead.
            "" if whole else _number(row.first_p50_s, 2),
            "" if whole else _number(row.first_p95_s, 2),
            "" if whole else _number(row.tpot_p50_ms, 0),
            "" if whole else _number(row.tpot_p95_ms, 0),
            str(row.failed + row.timed_out),
            end_section=is_last,
            style="bold" if whole else None,
        )
    return result


def _share(row: Row) -> str:
    if row.attainment is None:
        return "-"
    return f"{row.attainment:.2f} ({row.attainment_low:.2f} to {row.attainment_high:.2f})"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def ratio_line(one: Ratio) -> str:
    """A ratio of attainments with its interval, in words."""
    if math.isnan(one.ratio):
        return f"{one.arm} : {one.over} = undefined (neither kept a promise)"
    return (
        f"{one.arm} : {one.over} = {_times(one.ratio)}"
        f" (95% {_times(one.low)} to {_times(one.high)}, same traces)"
    )


def _times(value: float) -> str:
    return "infinite" if math.isinf(value) else f"{value:.2f}x"
