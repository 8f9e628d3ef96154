"""Plans of single steps. A step takes 30 ms, 3 ms a decode and 1 ms a prompt token."""

from __future__ import annotations

import random
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horizonserve.policy.batch import Load, StepModel
from horizonserve.policy.lending import Job, Lending, Limits, Plan
from horizonserve.policy.slack import Ticket
from horizonserve.slo import Path, RequestClass

NOW_S = 100.0
TBT_S = 0.06


def taught() -> StepModel:
    model, rng = StepModel(), random.Random(0)
    for _ in range(400):
        load = Load(rng.randint(0, 20), rng.choice([0, rng.randint(1, 200)]))
        model.observe(load, 0.03 + 0.003 * load.decodes + 0.001 * load.prefill_tokens)
    return model


MODEL = taught()


def lending(**limits: Any) -> Lending:
    return Lending(MODEL, Limits(**({"tokens": 4096, "target_s": 2.0} | limits)))


def stream(name: str, bank_s: float = 0.0, to_generate: int = 50, **fields: Any) -> Job:
    """A short request that streams, with so much time in the bank."""
    ticket = Ticket(name, RequestClass.T2T, Path.SHORT, 90.0, 92.0, 0.4, TBT_S, started=True)
    ticket.released_s, ticket.served_s = NOW_S + bank_s, NOW_S
    for field, value in fields.items():
        setattr(ticket, field, value)
    return Job(name, ticket, 1, 100, 10, to_generate, decode=True)


def prompt(name: str, tokens: int, due_in_s: float = 2.0, begun: int = 0) -> Job:
    ticket = Ticket(name, RequestClass.T2T, Path.SHORT, NOW_S, NOW_S + due_in_s, 0.4, TBT_S)
    ticket.served_s = NOW_S
    return Job(name, ticket, tokens, begun, 0, 50, runs=begun > 0)


def audio(name: str, age_s: float = 1.0, to_generate: int = 50) -> Job:
    arrival_s = NOW_S - age_s
    ticket = Ticket(name, RequestClass.T2A, Path.LONG, arrival_s, arrival_s + 20.0, 4.0)
    ticket.served_s = NOW_S
    return Job(name, ticket, 1, 100, 10, to_generate, decode=True)


def names(jobs: list[Job]) -> str:
    return " ".join(job.request for job in jobs)


def duration_s(plan: Plan) -> float:
    decodes = sum(job.decode for job in plan.run)
    return MODEL.step_s(Load(decodes, plan.tokens - decodes))


def test_where_there_is_room_all_advance() -> None:
    plan = lending().plan([stream("s1"), stream("s2"), audio("l1")], [prompt("w1", 5)], NOW_S)
    assert (names(plan.run), names(plan.lend), names(plan.enter)) == ("s1 s2 l1", "", "w1")
    assert plan.tokens == 3 + 5 and plan.given_up == 0


def test_a_full_step_lends_the_places_with_most_slack() -> None:
    """60 ms hold nine decodes; those with a bank can pause, those without cannot."""
    rich = [stream(f"s{i}", bank_s=1.0 + i) for i in range(1, 5)]
    poor = [stream(f"t{i}") for i in range(1, 8)]
    plan = lending().plan([*rich, *poor], [], NOW_S)
    assert {*names(plan.run).split()} >= {f"t{i}" for i in range(1, 8)}
    assert {*names(plan.lend).split()} <= {f"s{i}" for i in range(1, 5)}
    assert plan.lend and plan.given_up == 0
    assert duration_s(plan) <= TBT_S


def test_a_waiting_prompt_enters_while_those_with_slack_sit_out() -> None:
    rich = [stream(f"s{i}", bank_s=3.0) for i in range(12)]
    plan = lending().plan([stream("t1"), *rich], [prompt("w1", 20, due_in_s=0.3)], NOW_S)
    assert names(plan.enter) == "w1"
    assert "t1" in names(plan.run) and len(plan.lend) >= 5
    assert duration_s(plan) <= TBT_S


def test_a_long_prompt_is_cut_to_what_the_step_can_hold() -> None:
    plan = lending().plan([stream("s1")], [prompt("w1", 2000, due_in_s=30.0)], NOW_S)
    assert names(plan.run) == "s1"
    assert 10 <= plan.tokens - 1 <= 27
    assert duration_s(plan) <= TBT_S


def test_without_a_stream_a_prompt_may_take_a_tenth_of_the_target() -> None:
    plan = lending().plan([], [prompt("w1", 2000, due_in_s=30.0)], NOW_S)
    assert duration_s(plan) == pytest.approx(0.2, rel=0.05)


def test_prefills_go_by_due_time_whether_they_run_or_wait() -> None:
    begun, waits = prompt("p1", 100, due_in_s=9.0, begun=50), prompt("w1", 100, due_in_s=4.0)
    plan = lending().plan([stream("s1"), begun], [waits], NOW_S)
    assert (names(plan.run), names(plan.lend), names(plan.enter)) == ("s1", "p1", "w1")


def test_what_needs_most_work_is_given_up_first_and_the_same_each_time() -> None:
    """Sixteen streams without bank cannot all have a token in 60 ms."""
    streams = [stream(f"s{i}", to_generate=20 + i) for i in range(16)]
    plans = [lending().plan(order, [], NOW_S) for order in (streams, streams)]
    assert plans[0] == plans[1]
    assert plans[0].given_up >= 2
    lent = sorted(int(name[1:]) for name in names(plans[0].lend).split())
    assert lent == list(range(16 - len(lent), 16))


def test_a_stream_given_up_does_not_shorten_the_step_of_the_others() -> None:
    broken = stream("s0", broken=True)
    plan = lending().plan([broken, audio("l1")], [prompt("w1", 2000, due_in_s=30.0)], NOW_S)
    assert plan.limit_s > 2 * TBT_S


def test_many_broken_streams_leave_room_for_whose_promise_is_whole() -> None:
    storm = [stream(f"b{i}", broken=True, served_s=NOW_S - 1.0) for i in range(40)]
    plan = lending().plan([*storm, stream("s1")], [prompt("w1", 10, due_in_s=1.0)], NOW_S)
    assert "s1" in names(plan.run) and names(plan.enter) == "w1"
    assert plan.given_up == 0


def test_of_those_given_up_who_needs_least_to_its_end_goes_first() -> None:
    late = [audio("l1", age_s=30.0, to_generate=9), stream("s2", to_generate=30, broken=True)]
    late += [stream("s1", to_generate=5, broken=True)]
    assert names(lending(requests=1).plan(late, [], NOW_S).run) == "s1"
    assert names(lending(requests=2).plan(late, [], NOW_S).run) == "s1 l1"


def test_nobody_sits_out_longer_than_the_bound() -> None:
    poor = [stream(f"t{i}") for i in range(10)]
    broken = stream("s1", broken=True, served_s=NOW_S - 5.5)
    assert lending(max_wait_s=5.0).plan([*poor, broken], [], NOW_S).run[0] is broken
    assert lending(max_wait_s=6.0).plan([*poor, broken], [], NOW_S).run[0] is not broken


def test_a_long_request_with_little_time_left_goes_before_one_with_much() -> None:
    poor = [stream(f"t{i}") for i in range(8)]
    hurried, idle = audio("l1", age_s=13.0), audio("l2", age_s=0.0)
    plan = lending().plan([*poor, idle, hurried], [], NOW_S)
    assert "l1" in names(plan.run) and names(plan.lend) == "l2"


def test_a_fixed_batch_bounds_the_requests_that_advance() -> None:
    plan = lending(requests=3).plan([stream(f"s{i}") for i in range(6)], [], NOW_S)
    assert len(plan.run) == 3 and len(plan.lend) == 3


def test_a_stage_that_cannot_cut_takes_a_prompt_whole() -> None:
    plan = lending(splits=False).plan([stream("s1")], [prompt("w1", 500)], NOW_S)
    assert names(plan.enter) == "w1" and plan.tokens == 501


def test_tokens_in_flight_count_as_served() -> None:
    """Asynchronous scheduling: the step under way makes the token that is due."""
    waits = stream("s1", bank_s=-0.05)
    flying = stream("s2", bank_s=-0.05)
    flying.in_flight = 1
    lending().plan([waits, flying], [], NOW_S)
    assert flying.pace_s > waits.pace_s


def test_a_lost_prompt_takes_what_is_left_unless_the_view_puts_it_first() -> None:
    lost, winnable = prompt("w1", 100, due_in_s=-1.0), prompt("w2", 100, due_in_s=2.0)
    running = [stream("s1")]
    assert names(lending().plan(running, [winnable, lost], NOW_S).enter) == "w2"
    assert names(lending().plan(running, [lost], NOW_S).enter) == "w1"
    assert names(lending().plan(running, [lost, winnable], NOW_S).enter) == "w1"


job_lists = st.lists(
    st.one_of(
        st.builds(
            stream,
            st.just("s"),
            st.floats(-0.2, 5.0),
            st.integers(1, 400),
            broken=st.booleans(),
            served_s=st.floats(NOW_S - 20, NOW_S),
        ),
        st.builds(audio, st.just("l"), st.floats(0.0, 30.0), st.integers(1, 400)),
        st.builds(prompt, st.just("p"), st.integers(1, 3000), st.floats(-2.0, 9.0), st.just(16)),
    ),
    max_size=40,
)
waiting_lists = st.lists(
    st.builds(prompt, st.just("w"), st.integers(1, 3000), st.floats(-2.0, 9.0)), max_size=10
)


@settings(max_examples=200, deadline=None)
@given(job_lists, waiting_lists, st.sampled_from([None, 1, 5]), st.booleans())
def test_every_plan_is_sound(
    running: list[Job], waiting: list[Job], batch: int | None, splits: bool
) -> None:
    plan = lending(requests=batch, splits=splits, tokens=3000).plan(running, waiting, NOW_S)
    taken = [*plan.run, *plan.enter]
    assert len(set(map(id, taken))) == len(taken)
    assert {*map(id, plan.run), *map(id, plan.lend)} == set(map(id, running))
    assert {*map(id, plan.enter)} <= set(map(id, waiting))
    assert bool(taken) == bool(running or waiting)
    assert len(taken) <= (batch or inf)
    assert 1 <= plan.tokens <= 3000
    order = [not job.decode for job in plan.run]
    assert order == sorted(order)
    if splits and len(taken) > 1:
        assert duration_s(plan) <= plan.limit_s * 1.02
