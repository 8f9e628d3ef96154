"""Metrics and intervals on examples worked by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from horizonserve.bench.intervals import (
    block_quantile,
    paired_ratio,
    repeated_quantile,
    t_interval,
    wilson,
)
from horizonserve.bench.metrics import (
    Attainment,
    Promise,
    Targets,
    attainment,
    by_block,
    met,
    quantile,
    report,
)
from horizonserve.bench.result import Result, Status
from horizonserve.slo import RequestClass

T2T, T2A = RequestClass.T2T, RequestClass.T2A
SLO_S = {T2T: 1.0, T2A: 10.0}
TARGETS = Targets(SLO_S, tbt_s=0.25)


def result(
    status: Status = Status.OK,
    first_s: float | None = 0.5,
    end_s: float = 2.0,
    request_class: RequestClass = T2T,
    at_s: float = 0.0,
    tpot_s: float | None = None,
    token_s: tuple[float, ...] = (),
) -> Result:
    return Result(0, request_class, at_s, status, first_s, end_s, tpot_s=tpot_s, token_s=token_s)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (result(first_s=1.0), True),
        (result(first_s=1.01), False),
        (result(Status.FAILED, None, 0.1), False),
        # In time at first, but the user never got the whole answer.
        (result(Status.FAILED, 0.5), False),
        (result(Status.TIMEOUT, 0.5), False),
        (result(Status.CUT, 0.5, 0.8), True),
        (result(Status.CUT, 1.5, 1.8), False),
        (result(Status.CUT, None, 0.9), None),
        (result(Status.CUT, None, 1.1), False),
    ],
)
def test_met(one: Result, expected: bool | None) -> None:
    assert met(one, 1.0) is expected


def streamed(*token_s: float, status: Status = Status.OK, end_s: float | None = None) -> Result:
    return result(status, token_s[0], token_s[-1] if end_s is None else end_s, token_s=token_s)


# First response within 1 s, then a token every 0.25 s; all numbers are exact in binary.
@pytest.mark.parametrize(
    ("one", "both", "at_once"),
    [
        # A token each 0.25 s from the first on.
        (streamed(0.5, 0.75, 1.0, 1.25), True, True),
        # Releases 1, 1.25, 1.5: a pause of 1 s is hidden by the early start, not at once.
        (streamed(0.5, 0.5, 1.5), True, False),
        (streamed(0.5, 0.5, 1.5625), False, False),
        # At once 0.5, 0.75, 1: three tokens in one chunk may be used up.
        (streamed(0.5, 0.5, 0.5, 1.25), True, True),
        (streamed(0.5, 0.5, 0.5, 1.2578125), True, False),
        # A first token at its target leaves no advance.
        (streamed(1.0, 1.25, 1.5), True, True),
        (streamed(1.0, 1.2578125, 1.5), False, False),
        # Late for the second token once is late, whatever follows.
        (streamed(1.0, 1.5, 1.5, 1.5), False, False),
        # The first response late: the tokens do not help.
        (streamed(1.25, 1.5), False, False),
        # Cut off while the next token is not due yet (1.25 + 0.25), and after that.
        (streamed(1.0, 1.25, status=Status.CUT, end_s=1.5), True, True),
        (streamed(1.0, 1.25, status=Status.CUT, end_s=1.5078125), False, False),
        # In advance: due at 1.5, and at once at 1.
        (streamed(0.5, 0.5, status=Status.CUT, end_s=1.25), True, False),
        (streamed(0.5, status=Status.TIMEOUT, end_s=0.5), False, False),
        (streamed(0.5, 0.75, status=Status.FAILED), False, False),
        (result(Status.CUT, None, 0.5), None, None),
        (result(Status.CUT, None, 1.5), False, False),
        # Audio has no promise between tokens.
        (result(first_s=9.0, request_class=T2A, end_s=50.0), True, True),
        (result(Status.CUT, first_s=9.0, request_class=T2A, end_s=50.0), True, True),
    ],
)
def test_both_promises(one: Result, both: bool | None, at_once: bool | None) -> None:
    assert TARGETS.kept(one, Promise.BOTH) is both
    assert TARGETS.kept(one, Promise.AT_ONCE) is at_once
    assert TARGETS.kept(one, Promise.FIRST) is met(one, SLO_S[one.request_class])
    # Nothing promised between tokens: the first response is all.
    assert Targets(SLO_S).kept(one, Promise.BOTH) is met(one, SLO_S[one.request_class])


def test_report_of_both_promises_and_gaps() -> None:
    results = [
        streamed(0.5, 0.5, 1.5),
        streamed(1.0, 1.5, 1.5),
        streamed(0.5, 0.75),
        result(Status.CUT, None, 0.1),
    ]
    one = report(results, TARGETS)[T2T]
    assert (one.attainment, one.both) == (Attainment(3, 3), Attainment(2, 3))
    assert one.at_once == Attainment(1, 3)
    # 0, 0, 0.25, 0.5, 1: the 95% rank is 3.8.
    assert one.gap_p95_s == pytest.approx(0.5 + 0.8 * 0.5)
    assert by_block(results, TARGETS, 10.0, Promise.BOTH) == {0: Attainment(2, 3)}


def test_block_quantile_draws_blocks_within_each_run() -> None:
    # Two blocks of equal values: the median is 1 or 3, or 2 where both were drawn.
    assert block_quantile([[[1.0, 1.0], [3.0, 3.0]]], 0.5) == (1.0, 3.0)
    # A run of one block is drawn as it is, every time.
    assert block_quantile([[[1.0, 2.0, 3.0]], [[4.0, 5.0]]], 0.5) == (3.0, 3.0)
    assert block_quantile([[[]], []], 0.5) is None


def test_the_quantile_of_a_repetition_falls_into_its_interval() -> None:
    rng = np.random.default_rng(3)

    def run() -> list[list[float]]:
        # A machine whose speed differs from block to block.
        return [list(rng.lognormal(speed, 0.2, size=20)) for speed in rng.normal(0.0, 0.05, size=6)]

    inside, widths = 0, []
    for _ in range(200):
        low, high = repeated_quantile(run(), 0.95, draws=200) or (0.0, 0.0)
        again = float(np.quantile(np.concatenate(run()), 0.95))
        inside += low <= again <= high
        widths.append(math.log(high / low) / 2)
    assert 0.9 <= inside / 200 <= 0.99
    assert 0.1 < np.median(widths) < 0.3
    assert repeated_quantile([[1.0, 2.0]], 0.95) is None
    assert repeated_quantile([[2.0, 2.0]] * 6, 0.95) == pytest.approx((2.0, 2.0))


def test_attainment_counts_failures_and_leaves_out_the_undecided() -> None:
    results = [
        result(),
        result(first_s=3.0, end_s=4.0),
        result(Status.FAILED, None),
        result(Status.CUT, None, 0.2),
        result(first_s=9.0, end_s=9.0, request_class=T2A),
    ]
    assert attainment(results, TARGETS) == Attainment(2, 4)
    by_class = report(results, TARGETS)
    assert list(by_class) == [T2T, T2A, None]
    assert by_class[T2T].attainment == Attainment(1, 3)
    # Completed only: the failure is not seen.
    assert by_class[T2T].completed == Attainment(1, 2)
    assert by_class[None].undecided == 1 and by_class[None].failed == 1
    assert by_class[T2A].attainment.value == 1.0


def test_first_response_quantiles_count_the_age_of_what_never_came() -> None:
    results = [result(first_s=0.5), result(Status.CUT, None, 4.5), result(Status.CUT, None, 0.1)]
    assert report(results, TARGETS)[T2T].first_p50_s == pytest.approx(2.5)
    assert quantile([], 0.5) is None


def test_tpot_is_of_those_that_have_one() -> None:
    results = [result(tpot_s=0.03), result(tpot_s=0.05), result()]
    assert report(results, TARGETS)[None].tpot_p50_s == pytest.approx(0.04)


def test_wilson_against_published_values() -> None:
    # Newcombe 1998, table I: 81 of 263 -> 0.2553 to 0.3662; 0 of 20 -> 0 to 0.1611.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_t_interval_by_hand() -> None:
    # Mean 0.5, s 0.1, half = 4.303 x 0.1 / sqrt(3) = 0.2484.
    assert t_interval([0.4, 0.5, 0.6]) == pytest.approx((0.2516, 0.7484), abs=1e-3)
    assert t_interval([0.0, 1.0]) == (0.0, 1.0)
    with pytest.raises(ValueError, match="1 runs"):
        t_interval([0.5])


def test_paired_ratio_of_the_same_runs_is_exactly_one() -> None:
    blocks = {0: Attainment(3, 10), 1: Attainment(9, 10), 2: Attainment(1, 10)}
    assert paired_ratio([(blocks, blocks)]) == (1.0, (1.0, 1.0))


def test_paired_ratio_by_hand() -> None:
    twice = {0: Attainment(8, 10), 1: Attainment(4, 10)}
    once = {0: Attainment(4, 10), 1: Attainment(2, 10)}
    # Every resample keeps the ratio of 2: the pairing takes the blocks' own spread out.
    ratio, (low, high) = paired_ratio([(twice, once), (once, {0: Attainment(2, 10)})])
    assert ratio == pytest.approx((18 / 40) / (8 / 30))
    assert low <= ratio <= high
    same = paired_ratio([(twice, once)])
    assert same[0] == pytest.approx(2.0) and same[1] == pytest.approx((2.0, 2.0))


def test_paired_ratio_with_nothing_kept() -> None:
    some, none = {0: Attainment(1, 2)}, {0: Attainment(0, 2)}
    assert paired_ratio([(some, none)]) == (math.inf, (math.inf, math.inf))
    assert math.isnan(paired_ratio([(none, none)])[0])


def test_by_block() -> None:
    results = [result(at_s=0.0), result(at_s=9.9, first_s=5.0), result(at_s=10.0)]
    assert by_block(results, TARGETS, 10.0) == {0: Attainment(1, 2), 1: Attainment(1, 1)}


def test_a_result_survives_its_json() -> None:
    one = result(tpot_s=0.03, token_s=(0.5, 0.5, 0.531))
    assert Result.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert streamed(0.12345678).to_json()["token_s"] == [0.123]


def test_a_result_from_before_the_tokens_had_times_has_none() -> None:
    plain = result().to_json()
    del plain["token_s"]
    assert Result.from_json(plain).token_s == ()
