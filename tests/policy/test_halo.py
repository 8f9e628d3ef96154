"""HALO's iterations, by the paper's Figure 8 and by what must always hold."""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonserve.policy.baselines import tokens_within
from horizonserve.policy.batch import Load, StepModel
from horizonserve.policy.halo import MOST_ENTER, Decodes, Halo, HaloLimits
from horizonserve.policy.lending import Job
from horizonserve.policy.slack import Ticket
from horizonserve.slo import Path, RequestClass

ITERATION_S = 0.040
_names = count()


class Steady(StepModel):
    """A machine whose iterations take 40 ms whatever they hold."""

    def step_s(self, load: Load) -> float:
        return ITERATION_S


def ticket(tbt_s: float, *, ttft_s: float = 1.0, arrival_s: float = 0.0) -> Ticket:
    deadline_s = arrival_s + ttft_s
    return Ticket(
        f"r{next(_names)}", RequestClass.T2T, Path.SHORT, arrival_s, deadline_s, 0.1, tbt_s
    )


def stream(tbt_s: float, slack_s: float = 0.0, now_s: float = 0.0, context: int = 100) -> Job:
    one = ticket(tbt_s)
    one.released_s = now_s + slack_s
    return Job(None, one, 1, context, 5, 100, decode=True)


def prompt(tokens: int, *, runs: bool = False, tbt_s: float = 0.05, ttft_s: float = 1.0) -> Job:
    return Job(None, ticket(tbt_s, ttft_s=ttft_s), tokens, 0, 0, 100, runs=runs)


def limits(batch_tokens: int | None, **more: float) -> HaloLimits:
    return HaloLimits(0.050, 4_096, batch_tokens, **more)


class Planned(NamedTuple):
    """An iteration, by its requests."""

    run: list[Job]
    lend: list[Job]
    enter: list[Job]
    tokens: int


def bank_s(job: Job, now_s: float) -> float:
    """Slack of a decode."""
    if job.ticket.path is Path.LONG:
        return -np.inf
    assert job.ticket.released_s is not None
    return job.ticket.released_s - now_s


def planned(halo: Halo, running: list[Job], waiting: list[Job], now_s: float) -> Planned:
    decodes = [job for job in running if job.decode]
    long = [job.ticket.path is Path.LONG for job in decodes]
    arrays = Decodes(
        np.array([bank_s(job, 0.0) for job in decodes], float),
        np.where(long, halo.limits.tbt_min_s, [job.ticket.tbt_s for job in decodes]),
        np.array([job.context_tokens for job in decodes], float),
    )
    prefills = [job for job in running if not job.decode]
    found = halo.plan(arrays, prefills, lambda most: waiting[:most], now_s)
    ordered = [decodes[index] for index in found.order]
    run = ordered[: found.computing] + found.prefills
    return Planned(run, ordered[found.computing :], found.enter, found.tokens)


def play(halo: Halo, running: list[Job], waiting: list[Job], now_s: float) -> tuple[Planned, float]:
    """One iteration: decodes get a token, prompts what the budget leaves."""
    plan = planned(halo, running, waiting, now_s)
    now_s += ITERATION_S
    decodes = [job for job in plan.run if job.decode]
    left = plan.tokens - len(decodes)
    for job in decodes:
        job.ticket.token(now_s)
    for job in [*(j for j in plan.run if not j.decode), *plan.enter]:
        done = min(left, job.tokens)
        left -= done
        job.tokens -= done
    return plan, now_s


@pytest.mark.parametrize(
    ("tbt_ms", "slacks_ms"),
    [(50, [0, 10, 20, 30, 40, 50]), (100, [0, 60, 20, 80, 40, 100])],
)
def test_figure_8_slack_of_a_request(tbt_ms: int, slacks_ms: list[int]) -> None:
    job = stream(tbt_ms / 1e3)
    seen, now_s = [], 0.0
    for step in range(6):
        seen.append(round(1e3 * bank_s(job, now_s)))
        now_s += ITERATION_S
        # The paper's relaxed request computes in every other iteration.
        if tbt_ms == 50 or step % 2 == 0:
            job.ticket.token(now_s)
    assert seen == slacks_ms and not job.ticket.broken


def test_figure_8_a_prompt_takes_two_iterations_instead_of_three() -> None:
    halo = Halo(Steady(), limits(256))
    running = [stream(0.050) for _ in range(64)] + [stream(0.100, 0.200) for _ in range(64)]
    new = prompt(384, runs=True)
    now_s, iterations = 0.0, 0
    while new.tokens:
        plan, now_s = play(halo, [*running, new], [], now_s)
        iterations += 1
        assert len([job for job in plan.run if job.decode]) == 64 and plan.tokens == 256
    assert iterations == 2
    assert not any(job.ticket.broken for job in running)


def test_figure_8_three_hundred_and_eighty_four_run_in_batches_of_256() -> None:
    halo = Halo(Steady(), limits(256))
    running = [stream(0.050) for _ in range(128)] + [stream(0.100) for _ in range(256)]
    now_s = 0.0
    # Half of the relaxed are a token ahead, as after the first turn.
    for job in running[128:256]:
        job.ticket.released_s = 0.060
    for _ in range(100):
        plan, now_s = play(halo, running, [], now_s)
        assert len(plan.run) <= 256 and len(plan.run) + len(plan.lend) == 384
    assert not any(job.ticket.broken for job in running)


def test_capacity_counts_how_often_a_stream_must_compute() -> None:
    halo = Halo(Steady(), limits(4))
    waiting = [prompt(1, tbt_s=tbt_s) for tbt_s in (0.05, 0.1, 0.1, 0.2, 0.2, 0.2, 0.2, 0.05)]
    # 1 + 1/2 + 1/2 + 4 x 1/4 = 3, and another one.
    assert planned(halo, [], waiting, 0.0).enter == waiting
    assert len(planned(halo, [stream(0.05)], waiting, 0.0).enter) == 7
    # Nobody passes the first that does not fit.
    assert planned(halo, [stream(0.05) for _ in range(4)], waiting[1:], 0.0).enter == []


def test_prompts_go_by_deadline_and_decodes_by_slack() -> None:
    halo = Halo(Steady(), limits(3))
    urgent, soon, later = stream(0.1, 0.01), stream(0.1, 0.05), stream(0.1, 0.09)
    plan = planned(halo, [later, soon, urgent], [], 0.0)
    assert plan.run == [urgent, soon, later] and not plan.lend
    second, first = prompt(2, runs=True, ttft_s=2.0), prompt(5, runs=True)
    plan = planned(halo, [later, second, first, soon, urgent], [], 0.0)
    assert plan.run == [urgent, first, second] and plan.lend == [soon, later]
    assert plan.tokens == 3


def test_a_slow_machine_computes_all_the_same() -> None:
    class Slow(Steady):
        fixed_s = 0.060  # more than the strictest TBT

        def decode_s(self, context_tokens: float) -> float:
            return 0.001

        def prefill_s(self, tokens: float, context_tokens: float) -> float:
            return 0.001 * tokens

    halo = Halo(Slow(), limits(None))
    decodes = [stream(0.05) for _ in range(8)]
    plan = planned(halo, [*decodes, prompt(100, runs=True)], [], 0.0)
    assert len(plan.run) == 9 and plan.tokens == 8 + 52
    assert planned(halo, [], [prompt(30)], 0.0).tokens == 30


def test_an_iteration_has_no_more_tokens_than_the_stage_takes() -> None:
    halo = Halo(StepModel(), HaloLimits(0.050, 16, None))
    decodes = [stream(0.05, 0.001 * index) for index in range(64)]
    plan = planned(halo, [*decodes, prompt(100, runs=True)], [], 0.0)
    assert plan.run == [*decodes[:16], plan.run[-1]] and plan.tokens == 16


def test_nobody_saves_more_than_the_bank_holds() -> None:
    halo = Halo(Steady(), limits(8, max_bank_s=2.0))
    rich, poor = stream(0.1, 2.5), stream(0.1, 1.5)
    plan = planned(halo, [rich, poor], [], 0.0)
    assert plan.run == [poor] and plan.lend == [rich]
    assert planned(halo, [rich, prompt(3, runs=True)], [], 0.0).lend == [rich]
    # Where nobody computes, sitting out is of use to nobody.
    assert planned(halo, [rich], [], 0.0).run == [rich]


def test_the_first_token_may_leave_at_once() -> None:
    held, at_once = ticket(0.1), ticket(0.1)
    at_once.asap = True
    for one in (held, at_once):
        one.token(0.3)
        one.token(0.35)
    assert (held.released_s, at_once.released_s) == pytest.approx((1.1, 0.4))
    late = ticket(0.1)
    late.asap = True
    late.token(1.01)
    assert late.broken


def test_a_request_for_a_later_stage_never_sits_out() -> None:
    halo = Halo(Steady(), limits(1))
    long = Job(None, ticket(float("inf")), 1, 100, 5, 100, decode=True)
    long.ticket.path = Path.LONG
    plan = planned(halo, [stream(0.1, 1.0), long], [prompt(1, tbt_s=0.2)], 0.0)
    assert plan.run == [long] and not plan.enter


def test_one_that_needs_more_than_there_is_enters_an_idle_stage() -> None:
    class Slow(Steady):
        def decode_s(self, context_tokens: float) -> float:
            return 1.0

    waiting = [prompt(1), prompt(1)]
    assert planned(Halo(Slow(), limits(None)), [], waiting, 0.0).enter == waiting[:1]


def test_a_burst_enters_in_a_few_iterations() -> None:
    halo = Halo(Steady(), limits(1_000))
    waiting = [prompt(1) for _ in range(3 * MOST_ENTER)]
    assert planned(halo, [], waiting, 0.0).enter == waiting[:MOST_ENTER]


def test_the_predicted_batch_ends_within_the_strictest_target() -> None:
    model = StepModel()
    for index in range(400):
        load = Load(index % 60, (index * 37) % 500, 0.0)
        model.observe(load, 0.013 + 22e-6 * (load.decodes + load.prefill_tokens))
    decodes = [stream(0.050, context=0) for _ in range(100)]
    tokens = tokens_within(model, 0.045, decodes, 4_096)
    assert tokens == pytest.approx((0.045 - 0.013) / 22e-6, rel=0.05)
    assert tokens_within(model, 0.001, decodes, 4_096) == 100
    halo = Halo(model, limits(None))
    assert planned(halo, decodes, [prompt(10_000)], 0.0).tokens == pytest.approx(1_454, rel=0.06)
    # More decodes than fit into the iteration: those with the least slack.
    crowd = [stream(0.050, 0.001 * index, context=0) for index in range(3_000)]
    plan = planned(halo, crowd, [], 0.0)
    assert plan.tokens == pytest.approx(1_454, rel=0.06)
    assert plan.run == crowd[: len(plan.run)]


@pytest.mark.parametrize(
    ("banks_ms", "iteration_ms"),
    [
        # 0.9 of the strictest TBT, whatever is in the bank.
        ([0, 100], 45.0),
        ([-30, 100], 45.0),
        # 0.9 of the time until the first token that must not be late; here 50 + 10 and 50 + 30 ms.
        ([10, 100], 54.0),
        ([30, 100], 72.0),
        # 1.5 of the strictest TBT.
        ([40, 100], 75.0),
        ([], 75.0),
    ],
)
def test_an_iteration_is_longer_where_every_bank_has_time_for_it(
    banks_ms: list[int], iteration_ms: float
) -> None:
    class Known(Steady):
        fixed_s = 0.013

        def decode_s(self, context_tokens: float) -> float:
            return 0.001

        def prefill_s(self, tokens: float, context_tokens: float) -> float:
            return 0.001 * tokens

    halo = Halo(Known(), limits(None))
    decodes = [stream(0.05, bank / 1e3) for bank in banks_ms]
    found = planned(halo, [*decodes, prompt(1_000, runs=True)], [], 0.0)
    assert found.tokens == int(iteration_ms - 13 + 1e-6)
    long = Job(None, ticket(float("inf")), 1, 100, 5, 100, decode=True)
    long.ticket.path = Path.LONG
    found = planned(halo, [long, prompt(1_000, runs=True)], [], 0.0)
    assert found.tokens == 45 - 13


jobs = st.builds(
    stream,
    st.sampled_from([0.05, 0.1, 0.2]),
    st.floats(-0.2, 3.0),
)


@given(
    st.lists(jobs, max_size=40),
    st.lists(st.integers(1, 600), max_size=5),
    st.integers(1, 64),
    st.sampled_from([0.5, float("inf")]),
)
def test_every_iteration(
    decodes: list[Job], prompts: list[int], batch_tokens: int, max_bank_s: float
) -> None:
    halo = Halo(Steady(), limits(batch_tokens, max_bank_s=max_bank_s))
    prefills = [prompt(tokens, runs=True) for tokens in prompts]
    plan = planned(halo, [*decodes, *prefills], [], 0.0)
    assert sorted(map(id, plan.run + plan.lend)) == sorted(map(id, decodes + prefills))
    computing = [job for job in plan.run if job.decode]
    urgent = [job for job in decodes if bank_s(job, 0.0) < ITERATION_S]
    assert set(urgent) <= set(computing) or len(computing) == batch_tokens
    assert len(computing) <= batch_tokens
    assert all(bank_s(ran, 0.0) <= bank_s(sat, 0.0) for ran in computing for sat in plan.lend)
    assert 1 <= plan.tokens <= batch_tokens
    assert plan.run or not decodes
