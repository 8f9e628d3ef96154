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
