"""What is chosen from a fixed-cap sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from horizonserve.profile import SmLevel, SmProfile
from horizonserve.profiling.figures import plot
from horizonserve.profiling.sm import Measured, Short, SmConfig, choose, s_cap, s_min

#: HorizonServe, Figure 4(b); its text has no co-run TTFT at 64 SMs, so that one is made up.
PAPER = [
    SmLevel(shared_sms=64, downstream_sms=78, tpot_p50_ms=4.80, corun_ttft_p50_ms=50.0),
    SmLevel(shared_sms=80, downstream_sms=62, tpot_p50_ms=4.65, corun_ttft_p50_ms=43.3),
    SmLevel(shared_sms=120, downstream_sms=22, tpot_p50_ms=5.57, corun_ttft_p50_ms=94.2),
]
WHOLE = SmLevel(shared_sms=142, downstream_sms=0, tpot_p50_ms=4.60, corun_ttft_p50_ms=40.0)


def test_the_cap_is_near_the_best_and_not_where_co_running_is_slow() -> None:
    assert s_cap(PAPER, tolerance=0.03, degradation=0.1) == 80
    assert s_cap(PAPER, tolerance=0.04, degradation=0.2) == 64
    as_fast = PAPER[2].model_copy(update={"tpot_p50_ms": 4.65})
    assert s_cap([as_fast], tolerance=0.03, degradation=0.1) == 120
    assert s_cap([*PAPER[:2], as_fast], tolerance=0.03, degradation=0.1) == 80


def test_the_whole_device_is_never_a_cap() -> None:
    assert s_cap([*PAPER, WHOLE], tolerance=0.03, degradation=0.1) == 80
    assert s_cap([*PAPER, WHOLE], tolerance=0.001, degradation=0.1) is None
    assert s_min([WHOLE], slowest=0.25) is None


def test_the_minimum_is_the_smallest_that_is_not_too_slow() -> None:
    rows = [*PAPER, SmLevel(shared_sms=16, downstream_sms=126, tpot_p50_ms=9.0)]
    assert s_min(rows, 0.25) == 64
    assert s_min(rows, 1.0) == 16


def test_nothing_is_chosen_where_a_level_was_not_measured() -> None:
    rows = [*PAPER, SmLevel(shared_sms=142, downstream_sms=0)]
    assert s_cap(rows, 0.03, 0.1) is None and s_min(rows, 0.25) is None


def test_a_sweep_becomes_a_profile_and_a_plot(tmp_path: Path) -> None:
    levels = [(1, 1), (2, 0)]
    found = {
        shared: Measured(
            [0.030 + 0.001 * (2 - shared)] * 3,
            [Short(float(i), 0.05 + 0.1 * (i > 3), i > 3, 0.5) for i in range(8)],
        )
        for shared, _ in levels
    }
    made = choose(levels, found, SmConfig(), "cores")
    # One core alone is 1 ms of 30 slower than two: more than 3%.
    assert made.s_cap_sms is None and made.s_min_sms == 1 and made.b_sat is None
    assert made.levels[0].corun_ttft_p50_ms == pytest.approx(150.0)
    out = tmp_path / "figure.png"
    plot(made, found[2].shorts, "simulated", out)
    assert out.stat().st_size > 10_000
    assert SmProfile.model_validate(made.model_dump()) == made
