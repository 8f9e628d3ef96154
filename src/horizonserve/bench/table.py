"""The tables a person reads."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Group
from rich.table import Table

from horizonserve.bench.summary import ALL, Ratio, Row

KIND = "measured on CPU engine"


def table(rows: Sequence[Row], title: str, kind: str = KIND) -> Group:
    """What was kept, then how long it took; a block per arm. Fits 80 columns."""
    return Group(_promises(rows, f"{title}\n[dim]{kind}[/dim]"), _times(rows))


def _promises(rows: Sequence[Row], title: str) -> Table:
    """All classes, then each.

    The last column is failed and timed-out requests, and those left out as undecided.
    """
    result = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("policy", overflow="fold", min_width=9)
    result.add_column("class", no_wrap=True)
    names = ("n", "first response\n(95%)", "both promises\n(95%)", "read at\nonce")
    for name in (*names, "fail/\nout"):
        result.add_column(name, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        whole = row.request_class == ALL
        result.add_row(
            row.arm if whole else "",
            row.request_class,
            str(row.requests),
            _share(row.attainment, row.attainment_low, row.attainment_high),
            _share(row.both, row.both_low, row.both_high),
            "-" if row.at_once is None else f"{row.at_once:.2f}",
            f"{row.failed + row.timed_out}/{row.undecided}",
            end_section=index + 1 == len(rows) or rows[index + 1].arm != row.arm,
            style="bold" if whole else None,
        )
    return result


def _times(rows: Sequence[Row]) -> Table:
    """Each class; one figure over classes that differ by an order of magnitude would mislead."""
    result = Table(
        title="[dim]p50/p95, and the targets (SLO, TBT)[/dim]",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    result.add_column("policy", overflow="fold", min_width=9)
    result.add_column("class", no_wrap=True)
    names = ("SLO\ns", "first re-\nsponse s", "p95's\n95%", "TBT\nms", "TPOT\nms", "gap\np95 ms")
    for name in names:
        result.add_column(name, justify="right", no_wrap=True)
    of_classes = [row for row in rows if row.request_class != ALL]
    named = ""
    for index, row in enumerate(of_classes):
        result.add_row(
            "" if row.arm == named else row.arm,
            row.request_class,
            _figure(row.slo_ms, 1_000),
            _pair(row.first_p50_s, row.first_p95_s),
            _pair(row.first_p95_low_s, row.first_p95_high_s, "-"),
            _figure(row.tbt_ms),
            _pair(row.tpot_p50_ms, row.tpot_p95_ms),
            _figure(row.gap_p95_ms),
            end_section=index + 1 == len(of_classes) or of_classes[index + 1].arm != row.arm,
        )
        named = row.arm
    return result


def _pair(low: float | None, high: float | None, sign: str = "/") -> str:
    return "-" if low is None or high is None else f"{_short(low)}{sign}{_short(high)}"


def _figure(value: float | None, per: float = 1.0) -> str:
    return "" if value is None else _short(value / per)


def _short(value: float) -> str:
    """About three digits."""
    return f"{value:.{2 if value < 10 else 1 if value < 20 else 0}f}"


def _share(share: float | None, low: float, high: float) -> str:
    return "-" if share is None else f"{share:.2f} ({low:.2f}-{high:.2f})"


def ratio_line(one: Ratio) -> str:
    """A ratio of attainments with its interval, in words."""
    arms = f"{one.promise}: {one.arm} : {one.over}"
    if math.isnan(one.ratio):
        return f"{arms} = undefined (neither kept a promise)"
    return f"{arms} = {_x(one.ratio)} (95% {_x(one.low)} to {_x(one.high)}, same traces)"


def _x(value: float) -> str:
    return "infinite" if math.isinf(value) else f"{value:.2f}x"
