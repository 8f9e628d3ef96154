"""Expected lengths."""

from __future__ import annotations

from horizonserve.policy.lengths import Lengths
from horizonserve.slo import RequestClass

TEXT, AUDIO = RequestClass.T2T, RequestClass.T2A


def test_nothing_known_and_never_more_than_allowed() -> None:
    lengths = Lengths()
    assert lengths.to_generate(TEXT, 0, 10_000) == 256
    assert lengths.to_generate(TEXT, 0, 40) == 40
    assert lengths.to_generate(TEXT, 300, 10_000) == 300


def test_nine_of_ten_answers_are_covered_per_class() -> None:
    lengths = Lengths()
    for tokens in range(1, 101):
        lengths.ended(TEXT, tokens)
    assert lengths.to_generate(TEXT, 0, 10_000) == 90
    # Of those longer than 60, nine of ten end by 96.
    assert lengths.to_generate(TEXT, 60, 10_000) == 36
    assert lengths.to_generate(AUDIO, 0, 10_000) == 256


def test_old_answers_are_forgotten() -> None:
    lengths = Lengths()
    for _ in range(200):
        lengths.ended(TEXT, 500)
    for _ in range(128):
        lengths.ended(TEXT, 20)
    assert lengths.to_generate(TEXT, 0, 10_000) == 20


def test_at_least_one_token_is_to_come() -> None:
    lengths = Lengths()
    lengths.ended(TEXT, 5)
    assert lengths.to_generate(TEXT, 4, 1) == 1
    assert lengths.to_generate(TEXT, 5, 10_000) == 251
