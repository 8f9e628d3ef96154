"""The baselines' orders, each on an example that can be followed by hand."""

from __future__ import annotations

from horizonserve.policy.baselines import EarliestDeadline, Fcfs, VtcRate, VtcTokens
from horizonserve.policy.slack import Ticket
from horizonserve.slo import Path, RequestClass


def request(name: str, service: str, tokens: int = 10, deadline_s: float = 1.0) -> Ticket:
    one = Ticket(name, RequestClass.T2T, Path.SHORT, 0.0, deadline_s, 0.1, 0.05)
    one.service, one.prompt_tokens = service, tokens
    return one


def names(order: list[Ticket]) -> list[str]:
    return [one.group for one in order]


def test_fcfs_and_deadlines() -> None:
    waiting = [request("a", "x", deadline_s=3), request("b", "y", deadline_s=1)]
    assert names(Fcfs().order(waiting, 0.0)) == ["a", "b"]
    assert names(EarliestDeadline().order(waiting, 0.0)) == ["b", "a"]


def test_who_has_paid_least_goes_next() -> None:
    vtc = VtcTokens()
    waiting = [request("a1", "a", 10), request("a2", "a", 10), request("b1", "b", 25)]
    for one in waiting:
        vtc.arrived(one, [other for other in waiting if other is not one])
    # a 0, b 0: a1 (a pays 10), b1 (b pays 25), a2.
    assert names(vtc.order(waiting, 0.0)) == ["a1", "b1", "a2"]
    vtc.started(waiting[0])
    vtc.generated(waiting[0], 8, first=True, now_s=0.5)
    assert vtc.paid == {"a": 26.0, "b": 0.0}
    # b has 0 and 25 after b1, still less than a.
    assert names(vtc.order(waiting[1:], 0.0)) == ["b1", "a2"]


def test_a_service_does_not_save_up_while_it_is_idle() -> None:
    vtc = VtcTokens()
    first, second = request("a", "a", 100), request("b", "b")
    vtc.arrived(first, [])
    vtc.started(first)
    waiting = [request("a2", "a")]
    vtc.arrived(second, waiting)
    assert vtc.paid == {"a": 100.0, "b": 100.0}


def test_a_price_of_nothing_for_prompts_is_halos_reading() -> None:
    vtc = VtcTokens(prompt_price=0.0, output_price=1.0)
    one = request("a", "a")
    vtc.arrived(one, [])
    vtc.started(one)
    vtc.generated(one, 3, first=False, now_s=0.0)
    assert vtc.paid == {"a": 3.0}


def test_the_service_with_the_most_late_first_tokens_goes_next() -> None:
    vtc = VtcRate()
    waiting = [request("a1", "a"), request("a2", "a"), request("b1", "b"), request("b2", "b")]
    for one in waiting:
        vtc.arrived(one, [])
    assert names(vtc.order(waiting, 0.5)) == ["a1", "a2", "b1", "b2"]
    vtc.generated(waiting[2], 1, first=True, now_s=1.5)
    vtc.generated(waiting[0], 1, first=True, now_s=0.5)
    # b: 1 late of 2, a: none.
    assert names(vtc.order([waiting[1], waiting[3]], 0.5)) == ["b2", "a2"]
    # Those that wait past their deadline count as well: a 1 of 2, b 2 of 2.
    assert names(vtc.order([waiting[1], waiting[3]], 2.0)) == ["b2", "a2"]
