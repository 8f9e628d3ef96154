"""What the demo says at its end, without a server."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from fake import ROW
from rich.console import Console

from horizonserve.bench.boot import BOOT_GUESS_S
from horizonserve.bench.demo import HORIZON, verdict
from horizonserve.bench.display import Display
from horizonserve.bench.metrics import Promise
from horizonserve.bench.slots_study import SlotsConfig
from horizonserve.bench.summary import Ratio
from horizonserve.bench.table import ratio_line, table

LONE = replace(ROW, arm="horizon", attainment=0.5, attainment_low=0.4, attainment_high=0.6)


@pytest.mark.parametrize(
    ("low", "both", "words"),
    [(0.6, 0.7, "no slot count"), (0.1, 0.2, "default does better"), (0.4, 0.5, "uncertainty")],
)
def test_the_verdict(low: float, both: float, words: str) -> None:
    default = replace(ROW, arm="default", both=0.45, both_low=0.35, both_high=0.55)
    other = replace(ROW, arm="edf", both=0.3, both_low=0.25)
    ours = replace(ROW, arm=HORIZON, both=both, both_low=low)
    says = verdict([default, other, ours])
    assert words in says and "default" in says and f"{both:.2f}" in says


def test_a_table_fits_eighty_columns() -> None:
    out = StringIO()
    long = replace(ROW, arm="horizon-no-rotation-32s-4096t", requests=12_000)
    text = replace(ROW, request_class="t2t", slo_ms=6_000.0, tbt_ms=61.3)
    Console(file=out, width=80).print(table([ROW, text, LONE, long], "title"))
    lines = out.getvalue().splitlines()
    assert any("0.50 (0.40-0.60)" in line and "horizon" in line for line in lines)
    assert any("0.08 (0.04-0.15)" in line and "0.07" in line for line in lines)
    figures = ("6.00", "1.00/12.0", "11.0-13.5", "61", "40/80", "95")
    assert any(all(figure in line for figure in figures) for line in lines)
    assert any(line.endswith("0/0") for line in map(str.rstrip, lines))
    assert "measured on CPU engine" in out.getvalue()


def test_ratios_in_words() -> None:
    one = Ratio(Promise.FIRST, "demo", 1.5, "horizon", "default", 4.9, 3.0, float("inf"))
    assert ratio_line(one) == (
        "first response: horizon : default = 4.90x (95% 3.00x to infinite, same traces)"
    )
    assert ratio_line(replace(one, promise=Promise.BOTH)).startswith("both promises: ")
    assert "undefined" in ratio_line(replace(one, ratio=float("nan")))


def test_the_display_names_its_steps_where_there_is_no_terminal() -> None:
    out = StringIO()
    with Display(Console(file=out, width=80), 100.0) as display:
        with display.step("first [step]", 10.0) as say:
            say("1/3 [odd")
        display.skip(20.0)
        assert display.done_s == 30.0
    assert "first [step] ..." in out.getvalue()


def test_the_study_fits_its_time_limit() -> None:
    assert SlotsConfig().guess_s + BOOT_GUESS_S < SlotsConfig().time_limit_s
