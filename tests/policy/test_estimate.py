"""The estimator against machines whose times are known."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonserve.policy.estimate import LEAST_S, Curve, Estimator
from horizonserve.slo import RequestClass

T2T, T2A = RequestClass.T2T, RequestClass.T2A
START_S = dict.fromkeys(RequestClass, 1.0)


def machine_s(prompt_tokens: int, answer_tokens: int) -> float:
    return 0.05 + 0.7e-3 * prompt_tokens + 2e-7 * prompt_tokens**2 + 0.04 * answer_tokens


def requests(count: int, seed: int, answers: bool) -> list[tuple[int, int]]:
    chance = random.Random(seed)
    return [
        (round(10 * 100 ** chance.random()), chance.randint(16, 128) if answers else 0)
        for _ in range(count)
    ]


def errors(estimator: Estimator, name: RequestClass, seed: int, slower: float = 1.0) -> list[float]:
    answers = name is T2A
    return [
        abs(estimator.estimate_s(name, x, g) / (slower * machine_s(x, g)) - 1)
        for x, g in requests(200, seed, answers)
    ]


def test_a_curve_goes_through_its_points_and_on_beyond_them() -> None:
    curve = Curve([(10, 0.1), (100, 0.3), (1_000, 2.1)])
    assert [curve.first_response_s(x, 0) for x in (10, 100, 1_000)] == pytest.approx(
        [0.1, 0.3, 2.1]
    )
    assert curve.first_response_s(1, 0) == 0.1
    assert curve.first_response_s(2_000, 0) == pytest.approx(4.1)


def test_a_curve_of_one_point_is_flat() -> None:
    assert Curve([(50, 0.2)]).first_response_s(5_000, 0) == 0.2


def test_an_answer_token_adds_its_time() -> None:
    curve = Curve([(10, 2.0), (100, 3.0)], answer_tokens=32, per_answer_token_s=0.05)
    assert curve.first_response_s(10, 52) == pytest.approx(3.0)
    assert curve.first_response_s(10, 0) == pytest.approx(0.4)


@given(
    st.lists(st.tuples(st.integers(1, 8_000), st.floats(1e-4, 100.0)), min_size=1, max_size=8),
    st.integers(0, 20_000),
    st.integers(0, 20_000),
)
def test_a_curve_never_falls(points: list[tuple[int, float]], x: int, y: int) -> None:
    curve = Curve(points)
    low, high = (curve.first_response_s(tokens, 0) for tokens in sorted((x, y)))
    assert LEAST_S <= low <= high * (1 + 1e-9) and math.isfinite(high)


@pytest.mark.parametrize("name", [T2T, T2A])
def test_without_a_profile_it_is_right_after_a_hundred_requests(name: RequestClass) -> None:
    estimator = Estimator(START_S)
    chance = random.Random(3)
    for x, g in requests(100, 1, name is T2A):
        estimator.observe(name, x, g, machine_s(x, g) * chance.lognormvariate(0, 0.1))
    assert median(errors(estimator, name, 2)) < 0.25


@pytest.mark.parametrize("profiled", [True, False])
def test_a_machine_that_becomes_twice_as_slow_is_followed_within_thirty_requests(
    profiled: bool,
) -> None:
    sizes = [(x, machine_s(x, 0)) for x in (10, 50, 200, 1_000)]
    estimator = Estimator(START_S, {T2T: Curve(sizes)} if profiled else None)
    for x, g in requests(100, 1, answers=False):
        estimator.observe(T2T, x, g, machine_s(x, g))
    assert median(errors(estimator, T2T, 2)) < 0.15
    for x, g in requests(30, 4, answers=False):
        estimator.observe(T2T, x, g, 2 * machine_s(x, g))
    assert median(errors(estimator, T2T, 5, slower=2.0)) < 0.25


def test_one_odd_answer_changes_little() -> None:
    estimator = Estimator(START_S, {T2T: Curve([(10, 0.1), (1_000, 1.0)])})
    for _ in range(20):
        estimator.observe(T2T, 100, 0, estimator.estimate_s(T2T, 100, 0))
    before_s = estimator.estimate_s(T2T, 100, 0)
    estimator.observe(T2T, 100, 0, 1_000 * before_s)
    assert estimator.estimate_s(T2T, 100, 0) < 1.12 * before_s


def test_before_the_first_answer_it_says_what_it_was_told() -> None:
    estimator = Estimator({T2T: 0.3, T2A: 4.0})
    estimator.start({T2T: 0.5, T2A: 5.0})
    assert estimator.estimate_s(T2T, 500, 0) == 0.5
    assert estimator.estimate_s(T2A, 500, 90) == 5.0


@given(
    st.lists(
        st.tuples(st.integers(0, 100_000), st.integers(0, 10_000), st.floats(1e-6, 1e5)),
        max_size=40,
    ),
    st.integers(0, 1_000_000),
    st.booleans(),
)
def test_every_estimate_is_finite_and_above_zero(
    seen: list[tuple[int, int, float]], prompt_tokens: int, profiled: bool
) -> None:
    estimator = Estimator(START_S, {T2A: Curve([(10, 0.1)], 32, 0.1)} if profiled else None)
    for x, g, actual_s in seen:
        estimator.observe(T2A, x, g, actual_s)
    estimate_s = estimator.estimate_s(T2A, prompt_tokens, 100)
    assert math.isfinite(estimate_s) and estimate_s > 0


@pytest.mark.parametrize("actual_s", [0.0, -1.0, math.inf, math.nan])
def test_what_is_no_time_is_not_learned_from(actual_s: float) -> None:
    estimator = Estimator(START_S)
    estimator.observe(T2T, 10, 0, actual_s)
    assert estimator.answers(T2T) == 0 and estimator.estimate_s(T2T, 10, 0) == 1.0
