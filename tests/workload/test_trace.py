"""Traces: determinism, rates, shares, and the round trip through JSON lines."""

from __future__ import annotations

import json

import numpy as np
import pytest

from horizonserve.slo import Output, RequestClass
from horizonserve.workload import Mix, Trace, make_trace
from horizonserve.workload.prompt import prompt
from horizonserve.workload.trace import counts


def test_the_same_seed_gives_the_same_trace() -> None:
    assert make_trace(Mix(), 2.0, 60.0, 7) == make_trace(Mix(), 2.0, 60.0, 7)
    assert make_trace(Mix(), 2.0, 60.0, 7) != make_trace(Mix(), 2.0, 60.0, 8)


def test_arrivals_are_poisson() -> None:
    items = make_trace(Mix(), 10.0, 2_000.0, 1).items
    gaps_s = np.diff([item.at_s for item in items])
    assert len(items) == pytest.approx(20_000, rel=0.03)
    assert gaps_s.min() > 0
    # An exponential gap has mean and standard deviation 1 / rate.
    assert gaps_s.mean() == pytest.approx(0.1, rel=0.03)
    assert gaps_s.std() == pytest.approx(0.1, rel=0.03)
    assert all(0 <= item.at_s < 2_000 for item in items)


def test_shares_and_lengths_follow_the_mix() -> None:
    mix = Mix()
    items = make_trace(mix, 10.0, 1_000.0, 3).items
    share = counts(items)[RequestClass.T2A] / len(items)
    assert share == pytest.approx(0.3, abs=0.02)
    words = np.array([item.prompt_words for item in items])
    assert words.min() >= 10 and words.max() <= 1_000 and words.max() > 900
    assert (words > 60).mean() == pytest.approx(mix.long_prompt_share, abs=0.02)
    assert all(32 <= item.output_tokens <= 128 for item in items)
    assert len({item.seed for item in items}) == len(items)


def test_traces_of_two_rates_have_the_same_requests_at_scaled_times() -> None:
    slow = make_trace(Mix(), 1.0, 100.0, 5).items
    fast = make_trace(Mix(), 2.0, 50.0, 5).items
    assert len(slow) == len(fast)
    for a, b in zip(slow, fast, strict=True):
        assert a.at_s == pytest.approx(2 * b.at_s)
        assert (a.request_class, a.prompt_words, a.seed) == (
            b.request_class,
            b.prompt_words,
            b.seed,
        )


def test_media_only_where_the_class_has_some() -> None:
    shares = tuple((name, 0.1) for name in RequestClass)
    for item in make_trace(Mix(shares=shares), 10.0, 50.0, 1).items:
        letter = item.request_class.value[0]
        assert (item.audio_ms > 0) == (letter == "a")
        assert (item.image_px > 0) == (letter in "iv")
        assert (item.video_frames > 0) == (letter == "v")


def test_round_trip() -> None:
    trace = make_trace(Mix(), 2.0, 30.0, 1)
    assert Trace.from_jsonl(trace.to_jsonl()) == trace
    mix = Mix.of_audio_share(0.25)
    assert Mix.from_json(json.loads(json.dumps(mix.to_json()))) == mix


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1"),
        ("[]\n", "line 1: not a JSON object"),
        ('{"format": "other"}\n', "line 1: format 'other'"),
    ],
)
def test_a_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trace.from_jsonl(text)


def test_a_bad_line_is_named() -> None:
    text = make_trace(Mix(), 2.0, 5.0, 1).to_jsonl() + '{"at_s": 1}\n'
    with pytest.raises(ValueError, match=rf"line {len(text.splitlines())}: not a request"):
        Trace.from_jsonl(text)


@pytest.mark.parametrize(
    "bad",
    [
        {"shares": ((RequestClass.T2T, 0.5),)},
        {"shares": ((RequestClass.T2T, 0.5), (RequestClass.T2T, 0.5))},
        {"shares": ((RequestClass.T2T, 1.5), (RequestClass.T2A, -0.5))},
        {"short_words": (0, 5)},
        {"text_tokens": (5, 4)},
        {"long_prompt_share": 1.5},
    ],
)
def test_a_bad_mix_is_refused_by_name(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(bad))}:"):
        Mix(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate_rps", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_bad_rate_is_refused(rate_rps: float) -> None:
    with pytest.raises(ValueError, match="rate_rps"):
        make_trace(Mix(), rate_rps, 60.0, 1)


def test_alone_keeps_everything_but_the_shares() -> None:
    alone = Mix(text_tokens=(5, 6)).alone(RequestClass.T2A)
    assert alone.classes == (RequestClass.T2A,)
    assert alone.tokens_of(Output.TEXT) == (5, 6)


def test_prompts_are_seeded_and_of_the_length_asked_for() -> None:
    assert prompt(50, 1) == prompt(50, 1) != prompt(50, 2)
    assert len(prompt(50, 1).split()) == 50
