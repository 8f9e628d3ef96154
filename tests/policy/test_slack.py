"""Deadlines and slack ratio."""

import pytest

from horizonserve.policy.slack import Ticket
from horizonserve.slo import Path, RequestClass


def ticket(deadline_s: float = 5.0, estimate_s: float = 1.0) -> Ticket:
    return Ticket("a", RequestClass.T2T, Path.SHORT, 0.0, deadline_s, estimate_s)


@pytest.mark.parametrize(
    ("now_s", "ratio"), [(0.0, 5.0), (3.0, 2.0), (4.5, 0.5), (5.0, 0.0), (7.0, -2.0)]
)
def test_slack_ratio_is_time_left_over_time_needed(now_s: float, ratio: float) -> None:
    assert ticket().slack_ratio(now_s) == pytest.approx(ratio)


def streaming(now_s: float = 0.0) -> Ticket:
    return Ticket("s", RequestClass.T2T, Path.SHORT, now_s, now_s + 2.0, 0.4, tbt_s=0.1)


def test_tokens_are_released_by_the_schedule_and_never_before_the_deadline() -> None:
    """HALO's R_1 = max(G_1, A + TTFT), R_k = max(G_k, R_(k-1) + TBT)."""
    table = [
        # generated, released, next due
        (0.5, 2.0, 2.1),
        (0.6, 2.1, 2.2),
        (2.2, 2.2, 2.3),
        (2.25, 2.3, 2.4),
    ]
    it = streaming()
    for generated_s, released_s, due_s in table:
        it.token(generated_s)
        assert (it.released_s, it.due_s()) == (pytest.approx(released_s), pytest.approx(due_s))
        assert not it.broken
        assert it.served_s == generated_s
    it.token(2.41)
    assert it.broken and it.released_s == pytest.approx(2.41)


def test_a_late_first_token_breaks_the_promise() -> None:
    it = streaming()
    it.token(2.01)
    assert it.broken


def test_several_tokens_at_once_are_released_one_after_another() -> None:
    it = streaming()
    it.token(0.5, 3)
    assert it.released_s == pytest.approx(2.2) and not it.broken


def test_tokens_in_flight_move_the_due_time() -> None:
    it = streaming()
    assert (it.due_s(), it.due_s(1)) == (2.0, pytest.approx(2.1))
    it.token(1.0)
    assert (it.due_s(), it.due_s(2)) == (pytest.approx(2.1), pytest.approx(2.3))


def test_a_long_request_has_no_promise_between_tokens() -> None:
    it = Ticket("l", RequestClass.T2A, Path.LONG, 0.0, 5.0, 1.0)
    it.token(9.0)
    assert not it.broken and it.served_s == 9.0


def test_a_session_that_goes_on_is_promised_the_same_again() -> None:
    it = streaming()
    it.token(3.0)
    it.renew(10.0)
    assert (it.arrival_s, it.deadline_s, it.due_s()) == (10.0, 12.0, 12.0)
    assert not it.broken
