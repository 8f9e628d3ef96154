"""Seeded traffic of services."""

from __future__ import annotations

from collections import Counter
from statistics import median, pstdev

import pytest

from horizonserve.workload.services import HOSPITAL, Shape, make_calls


def test_the_same_seed_gives_the_same_calls() -> None:
    assert make_calls(HOSPITAL, 5, 20, 1) == make_calls(HOSPITAL, 5, 20, 1)
    assert make_calls(HOSPITAL, 5, 20, 1) != make_calls(HOSPITAL, 5, 20, 2)


def test_rate_services_and_lengths_are_as_asked() -> None:
    calls = make_calls({"a": Shape(100, 50), "b": Shape(400, 200)}, 20, 500, 3)
    assert len(calls) == pytest.approx(10_000, rel=0.05)
    counts = Counter(call.service for call in calls)
    assert counts["a"] == pytest.approx(counts["b"], rel=0.05)
    assert median(c.prompt_tokens for c in calls if c.service == "a") == pytest.approx(
        100, rel=0.05
    )
    assert median(c.answer_tokens for c in calls if c.service == "b") == pytest.approx(
        200, rel=0.05
    )
    assert all(0 <= c.at_s < 500 and c.prompt_tokens >= 1 and c.answer_tokens >= 1 for c in calls)


@pytest.mark.parametrize(("burst", "variation"), [(False, 1.0), (True, 2.0)])
def test_arrivals_vary_as_asked(burst: bool, variation: float) -> None:
    calls = make_calls(HOSPITAL, 10, 2_000, 1, burst)
    gaps_s = [b.at_s - a.at_s for a, b in zip(calls, calls[1:], strict=False)]
    assert pstdev(gaps_s) / (sum(gaps_s) / len(gaps_s)) == pytest.approx(variation, rel=0.1)


@pytest.mark.parametrize("name", ["rate_rps", "duration_s", "scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_number_is_named(name: str, value: float) -> None:
    given = {"rate_rps": 1.0, "duration_s": 1.0, "scale": 1.0} | {name: value}
    with pytest.raises(ValueError, match=name):
        make_calls(HOSPITAL, given["rate_rps"], given["duration_s"], 1, scale=given["scale"])
