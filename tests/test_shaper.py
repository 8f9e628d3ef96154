"""Release times of generated tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from horizonserve.shaper import Finish, First, Pace, Releases


def releases(pace: Pace, pieces: list[tuple[float, int]]) -> list[float]:
    stream = Releases(pace)
    last = len(pieces) - 1
    return [
        round(stream.release_s(at_s, tokens, index == last), 6)
        for index, (at_s, tokens) in enumerate(pieces)
    ]


def test_fast_tokens_leave_as_promised() -> None:
    pieces = [(0.01 * index, 1) for index in range(1, 6)]
    pace = Pace(0.5, 0.05, finish=Finish.PACE)
    assert releases(pace, pieces) == [0.5, 0.55, 0.6, 0.65, 0.7]
    assert releases(Pace(0.5, 0.05, First.ASAP, Finish.PACE), pieces) == [
        *(0.01, 0.06, 0.11, 0.16, 0.21),
    ]


def test_the_end_of_an_answer_is_not_held_back() -> None:
    assert releases(Pace(0.5, 0.05), [(0.1, 1), (0.2, 1)]) == [0.5, 0.2]


def test_a_late_token_leaves_at_once_and_the_next_counts_from_it() -> None:
    pieces = [(0.4, 1), (0.9, 1), (0.91, 1), (3.0, 1)]
    assert releases(Pace(0.5, 0.05), pieces) == [0.5, 0.9, 0.95, 3.0]


def test_a_piece_of_several_tokens_takes_the_time_of_all() -> None:
    assert releases(Pace(0.5, 0.05), [(0.1, 3), (0.2, 1), (9.0, 1)]) == [0.5, 0.65, 9.0]


@given(
    st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 4)), min_size=2, max_size=30),
    st.floats(0.01, 2.0),
    st.floats(0.005, 0.3),
)
def test_never_before_it_was_generated_nor_in_another_order(
    steps: list[tuple[float, int]], deadline_s: float, tbt_s: float
) -> None:
    now_s, pieces = 0.0, []
    for gap_s, tokens in steps:
        now_s += gap_s
        pieces.append((now_s, tokens))
    stream = Releases(Pace(deadline_s, tbt_s, finish=Finish.PACE))
    left = [stream.release_s(at_s, tokens, False) for at_s, tokens in pieces]
    assert all(out_s >= at_s for out_s, (at_s, _) in zip(left, pieces, strict=True))
    assert left == sorted(left) and left[0] >= deadline_s
