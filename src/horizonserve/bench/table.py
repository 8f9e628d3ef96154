"""The tables a person reads."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.table import Table

from horizonserve.bench.summary import ALL, Ratio, Row

KIND = "measured on CPU engine"


def table(rows: Sequence[Row], title: str, kind: str = KIND) -> Table:
    """One block per arm: all classes, then each. Fits 80 columns.

    The last column is failed and timed-out requests, and those left out as undecided.
    """
    result = Table(
        title=f"{title}\n[dim]{kind}; first response and TPOT as p50/p95[/dim]",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    result.add_column("policy", overflow="fold", min_width=9)
    result.add_column("class", no_wrap=True)
    for name in ("SLO\ns", "n", "attainment\n(95%)", "of com-\npleted", "first re-\nsponse s"):
        result.add_column(name, justify="right", no_wrap=True)
    for name in ("TPOT\nms", "fail/\nout"):
        result.add_column(name, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        is_last = index + 1 == len(rows) or rows[index + 1].arm != row.arm
        whole = row.request_class == ALL
        result.add_row(
            row.arm if whole else "",
            row.request_class,
            "" if row.slo_ms is None else f"{row.slo_ms / 1_000:.1f}",
            str(row.requests),
            _share(row),
            _number(row.completed_attainment, 2),
            # One figure over classes that differ by an order of magnitude would mislead.
            "" if whole else _pair(row.first_p50_s, row.first_p95_s),
            "" if whole else _pair(row.tpot_p50_ms, row.tpot_p95_ms),
            f"{row.failed + row.timed_out}/{row.undecided}",
            end_section=is_last,
            style="bold" if whole else None,
        )
    return result


def _pair(p50: float | None, p95: float | None) -> str:
    return "-" if p50 is None or p95 is None else f"{_short(p50)}/{_short(p95)}"


def _short(value: float) -> str:
    """About three digits."""
    return f"{value:.{2 if value < 10 else 1 if value < 20 else 0}f}"


def _share(row: Row) -> str:
    if row.attainment is None:
        return "-"
    return f"{row.attainment:.2f} ({row.attainment_low:.2f}-{row.attainment_high:.2f})"


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
