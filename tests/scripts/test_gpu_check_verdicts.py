"""From figures to verdicts, claim by claim."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_check import verdicts
from gpu_check.cli import judged
from gpu_check.parts import PARTS
from gpu_check.verdicts import Verdict

HOLDS, FAILS, UNTESTED = Verdict.HOLDS, Verdict.FAILS, Verdict.UNTESTED

Figures = dict[str, Any]


def spread(middle: float, half_width: float = 0.0) -> dict[str, float]:
    low, high = middle - half_width, middle + half_width
    return {"min": low, "p25": low, "p50": middle, "p75": high, "p99": high, "max": high}


def levels(*found: tuple[int, int, int]) -> Figures:
    die = {"total_sms": 132, "minimum_sms": 8, "alignment_sms": 8}
    return {"die": die, "ways": {"count": found}, "ladder": [*found, (132, 0, 0)]}


@pytest.mark.parametrize(
    ("shared", "downstream", "exist", "agree"),
    [
        (levels((8, 124, 1), (16, 116, 2)), levels((8, 124, 1), (16, 116, 2)), HOLDS, HOLDS),
        (levels((8, 124, 1), (16, 116, 2)), levels((8, 124, 1), (16, 116, 3)), HOLDS, FAILS),
        (levels((8, 124, 1), (16, 116, 2)), levels((8, 124, 1)), HOLDS, FAILS),
        (levels(), levels(), FAILS, UNTESTED),
    ],
)
def test_levels(shared: Figures, downstream: Figures, exist: Verdict, agree: Verdict) -> None:
    assert verdicts.levels_exist((shared, downstream)).verdict is exist
    assert verdicts.levels_agree((shared, downstream)).verdict is agree


def ran(*levels: tuple[int, range]) -> Figures:
    return {"levels": [{"granted_sms": granted, "sms": list(sms)} for granted, sms in levels]}


WHOLE = (ran((2, range(2)), (4, range(4))), ran((6, range(2, 8)), (4, range(4, 8))))


@pytest.mark.parametrize(
    ("sides", "disjoint", "granted"),
    [
        (WHOLE, HOLDS, HOLDS),
        # One SM in common at the second level.
        ((WHOLE[0], ran((6, range(2, 8)), (5, range(3, 8)))), FAILS, HOLDS),
        # Not all of what was granted.
        ((ran((4, range(2))), ran((4, range(4, 8)))), HOLDS, HOLDS),
        # More than was granted, none in common.
        ((ran((2, range(3))), ran((4, range(4, 8)))), HOLDS, FAILS),
        # Work that ran nowhere is no proof.
        ((ran((2, range(0))), ran((4, range(4, 8)))), HOLDS, FAILS),
    ],
)
def test_smid(sides: tuple[Figures, Figures], disjoint: Verdict, granted: Verdict) -> None:
    assert verdicts.smid_disjoint(sides).verdict is disjoint
    assert verdicts.smid_granted(sides).verdict is granted


def test_shared_sms_are_named() -> None:
    sides = (ran((4, range(4))), ran((5, range(3, 8))))
    assert verdicts.smid_disjoint(sides).why == "4+5 share SM [3]"


def test_a_thread_percentage_changes_what_is_seen() -> None:
    assert verdicts.percentage_changes((*WHOLE, *WHOLE)).verdict is FAILS
    wider = (ran((2, range(4)), (4, range(4))), WHOLE[1])
    assert verdicts.percentage_changes((*WHOLE, *wider)).verdict is HOLDS
    fewer = (ran((2, range(2))), ran((2, range(2, 4))))
    assert verdicts.percentage_changes((*WHOLE, *fewer)).verdict is HOLDS


@pytest.mark.parametrize(
    ("ratios", "turns", "beside"),
    [
        ((2.0, 2.0), HOLDS, FAILS),
        ((1.0, 1.05), FAILS, HOLDS),
        # Neither one nor the other.
        ((1.4, 1.4), FAILS, FAILS),
        # The one that was disturbed decides.
        ((1.0, 1.9), HOLDS, FAILS),
    ],
)
def test_corun(ratios: tuple[float, float], turns: Verdict, beside: Verdict) -> None:
    sides = [{"alone_s": 0.5, "together_s": 0.5 * ratio} for ratio in ratios]
    assert verdicts.take_turns(sides).verdict is turns
    assert verdicts.side_by_side(sides).verdict is beside


@pytest.mark.parametrize(("us", "own", "paper"), [(3.0, HOLDS, HOLDS), (12.0, FAILS, FAILS)])
def test_switch(us: float, own: Verdict, paper: Verdict) -> None:
    contexts = [{"sms": 8, "ms": 1.0, "mib": 2.0}, {"sms": 16, "ms": 3.0, "mib": 2.0}]
    sides = ({"activation_us": spread(us), "contexts": contexts},)
    assert verdicts.activation_own(sides).verdict is own
    assert verdicts.activation_paper(sides).verdict is paper
    assert "1.00 to 3.00 ms" in verdicts.activation_own(sides).why


@pytest.mark.parametrize(
    ("samples", "period_s", "verdict"),
    [(9, 1 / 6, HOLDS), (9, 1.0, HOLDS), (9, 2.0, FAILS), (2, 0.2, UNTESTED)],
)
def test_nvml_period(samples: int, period_s: float, verdict: Verdict) -> None:
    sides = ({"timed_samples": samples, "period_s": spread(period_s)},)
    assert verdicts.nvml_period(sides).verdict is verdict
    assert verdicts.nvml_period(({"timed_samples": 0, "period_s": None},)).verdict is UNTESTED


@pytest.mark.parametrize(("us", "verdict"), [(20.0, HOLDS), (30_000.0, FAILS)])
def test_nvml_latency(us: float, verdict: Verdict) -> None:
    assert verdicts.nvml_latency(({"latency_us": spread(us)},)).verdict is verdict


@pytest.mark.parametrize(
    ("idle", "load", "verdict"),
    [(0.0, 0.9, HOLDS), (0.5, 0.6, FAILS), (0.9, 0.1, FAILS), ("no GPM", "no GPM", UNTESTED)],
)
def test_nvml_load(idle: float | str, load: float | str, verdict: Verdict) -> None:
    other = {"idle": 0.0, "load": 0.0}
    for judge, name, rest in (
        (verdicts.load_seen_by_utilisation, "utilisation", "dram"),
        (verdicts.load_seen_by_dram, "dram", "utilisation"),
    ):
        figures = {name: {"idle": idle, "load": load}, rest: other, "copied_gb_s": 4000.0}
        finding = judge((figures,))
        assert finding.verdict is verdict
        if verdict is UNTESTED:
            assert finding.why == idle


@pytest.mark.parametrize(
    ("beside", "noise", "looks", "verdict"),
    [
        (100.0, 1.0, 30, HOLDS),
        (99.0, 1.0, 30, HOLDS),
        (103.0, 1.0, 30, HOLDS),
        (90.0, 1.0, 30, FAILS),
        # The loop varies more than what it is to show.
        (90.0, 20.0, 30, UNTESTED),
        (100.0, 1.0, 0, UNTESTED),
    ],
)
def test_nvml_launch(beside: float, noise: float, looks: int, verdict: Verdict) -> None:
    figures = {"looks": looks, "without_per_s": spread(100.0, noise), "with_per_s": spread(beside)}
    assert verdicts.launches_undisturbed((figures,)).verdict is verdict


def stages(**found: tuple[float, float]) -> tuple[Figures, Figures]:
    """TTFT and TPOT in ms per configuration; rungs as ``r8``."""
    shared = {
        name.removeprefix("r"): {
            "granted_sms": int(name[1:]) if name.startswith("r") else 132,
            "ttft_ms": spread(ttft),
            "tpot_ms": spread(tpot),
            "decode_gb_s": 1000.0,
        }
        for name, (ttft, tpot) in found.items()
    }
    downstream = {name: {"granted_sms": 1, "blocks_per_s": 100.0} for name in shared}
    return {"configurations": shared}, {"configurations": downstream}


@pytest.mark.parametrize(
    ("sides", "uncapped", "fullest"),
    [
        # The paper's figures: 43.3 ms at 80 SMs, 94.2 ms at 120.
        (stages(r8=(80, 9), r80=(43.3, 4.65), r120=(94.2, 5.57), uncapped=(95, 5)), HOLDS, HOLDS),
        # Lower TTFT, but the steps are too slow.
        (stages(r8=(20, 9), r80=(94, 4.8), r120=(94, 4.8), uncapped=(95, 4.8)), FAILS, FAILS),
        # More SMs are always better.
        (stages(r8=(90, 9), r80=(60, 5), r120=(50, 4), uncapped=(40, 4)), FAILS, FAILS),
        # Better than uncapped on the fullest rung only.
        (stages(r8=(90, 9), r80=(60, 5), r120=(40, 4), uncapped=(50, 4)), HOLDS, FAILS),
        (stages(r80=(40, 4), uncapped=(50, 4)), HOLDS, UNTESTED),
        (stages(uncapped=(50, 4), alone=(30, 4)), UNTESTED, UNTESTED),
    ],
)
def test_interference(sides: tuple[Figures, Figures], uncapped: Verdict, fullest: Verdict) -> None:
    assert verdicts.capped_beats_uncapped(sides).verdict is uncapped
    assert verdicts.capped_beats_fullest(sides).verdict is fullest


def replayed(low_high: float, high_low: float, low: float = 10, high: float = 2) -> Figures:
    """Times of a graph captured on one rung and replayed on the other; on its own as given."""
    replay = {"low on low": low, "low on high": low_high}
    replay |= {"high on low": high_low, "high on high": high}
    sms = {"low": 8, "high": 120}
    return {"sms": sms, "eager_ms": {"low": 10.0, "high": 2.0}, "replay_ms": replay}


@pytest.mark.parametrize(
    ("figures", "keeps", "follows"),
    [
        (replayed(10.1, 2.1), HOLDS, HOLDS),
        # Replays take the time of the level they are replayed on.
        (replayed(2, 10), FAILS, HOLDS),
        # A graph is far slower than eager work on its own level.
        (replayed(13, 2, low=13), HOLDS, FAILS),
        # Only one of both keeps its level.
        (replayed(10, 10), FAILS, HOLDS),
    ],
)
def test_graphs(figures: Figures, keeps: Verdict, follows: Verdict) -> None:
    assert verdicts.graph_keeps_its_level((figures,)).verdict is keeps
    assert verdicts.graph_per_level_follows((figures,)).verdict is follows


def test_graphs_on_levels_alike_tell_nothing() -> None:
    figures = replayed(10, 10) | {"eager_ms": {"low": 10.0, "high": 9.0}}
    for judge in (verdicts.graph_keeps_its_level, verdicts.graph_per_level_follows):
        assert judge((figures,)).verdict is UNTESTED


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_part_without_figures_gives_its_reason_to_each_claim(part) -> None:
    found = judged(part, "no GPU")
    assert list(found) == list(part.claims)
    assert {(finding.verdict, finding.why) for finding in found.values()} == {(UNTESTED, "no GPU")}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_figures_that_make_no_sense_cost_only_their_claims(part) -> None:
    found = judged(part, [{}])
    assert list(found) == list(part.claims)
    for finding in found.values():
        assert finding.verdict is UNTESTED and "cannot be judged" in finding.why
