"""Lending on the real scheduler classes, on a virtual clock. All figures here are simulated."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import Any

import pytest
from engine import BLOCK_TOKENS, answer, drain, free_blocks, make_request, step
from virtual import PROMISES, TARGETS, TBT_S, Virtual
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import RequestStatus

from horizonserve import instance
from horizonserve.bench.metrics import Promise, attainment
from horizonserve.policy.lengths import Lengths
from horizonserve.serving.plain import HorizonScheduler
from horizonserve.serving.schedulers import HorizonARAsyncScheduler, HorizonARScheduler
from horizonserve.serving.steps import job_of
from horizonserve.workload import Mix, make_trace

pytestmark = pytest.mark.vllm
Make = Callable[..., Any]

MIX = Mix(shares=Mix.of_audio_share(0.3).shares, long_words=(60, 2_000))
EVERY = pytest.mark.parametrize(
    "cls", [HorizonARScheduler, HorizonARAsyncScheduler, HorizonScheduler]
)


def played(
    make: Make, rate_rps: float, settings: dict[str, Any], *, seed: int = 1, slots: int = 96
) -> Virtual:
    scheduler = make(
        HorizonARScheduler, PROMISES | settings, slots=slots, token_budget=4096, blocks=12_000
    )
    run = Virtual(scheduler, noise=0.07, seed=seed)
    run.play(make_trace(MIX, rate_rps, 60.0, seed))
    return run


def share_kept(run: Virtual) -> float:
    """Of both promises."""
    return attainment(run.results(), TARGETS, Promise.BOTH).value or 0.0


def test_below_saturation_nearly_every_promise_is_kept(make: Make) -> None:
    assert share_kept(played(make, 0.6, {})) > 0.97


def test_above_it_more_promises_are_kept_than_at_any_slot_count(make: Make) -> None:
    ours = share_kept(played(make, 1.6, {}))
    others = [
        share_kept(played(make, 1.6, {"scheduler": "edf", "slots": slots})) for slots in (4, 8, 16)
    ]
    assert ours > max(others)


def test_nobody_is_forgotten(make: Make) -> None:
    run = played(make, 2.2, {"max_hide_s": 3})
    assert all(len(life.token_s) == life.tokens for life in run.lives.values())
    assert run.longest_pause_s() < 3 + 10 * max(one.took_s for one in run.steps)


def streams(make: Make, count: int, tokens: int = 400) -> Virtual:
    """``count`` equal streams that started at once; the model has learned."""
    run = Virtual(make(HorizonARScheduler, PROMISES, slots=64, token_budget=4096, blocks=12_000))
    for index in range(count):
        run.add(f"s{index}", run.clock[0], 30, tokens)
    return run


def test_the_batch_does_not_oscillate_under_a_constant_load(make: Make) -> None:
    run = streams(make, 6)
    while run.scheduler.has_unfinished_requests():
        run.step()
    assert {len(one.advanced) for one in run.steps[60:300]} == {6}


def test_steps_end_in_time_again_soon_after_the_machine_became_slower(make: Make) -> None:
    run = streams(make, 6, tokens=500)
    run.slower = lambda now_s: 1.5 if now_s > 1010.0 else 1.0
    while run.clock[0] < 1020.0:
        run.step()

    def over(from_s: float, to_s: float) -> float:
        late = [s.took_s / s.limit_s for s in run.steps if from_s < s.start_s - 1000.0 < to_s]
        return mean(late)

    assert over(5, 9.9) < 1.0
    assert over(10, 10.3) > 1.05
    assert over(12, 20) < 1.01


def test_a_step_stays_under_the_strictest_pace(make: Make) -> None:
    run = streams(make, 3)
    for _ in range(40):
        run.step()
    run.add("s900", run.clock[0], 1_500, 8)
    before = len(run.steps)
    while not run.lives["s900"].token_s:
        run.step()
    steps = run.steps[before:]
    assert len(steps) > 10
    # 3 s of bank, and what 40 short steps added, over the 360 tokens to come.
    pace_s = TBT_S + (3.0 + 40 * TBT_S) / 360
    assert max(one.limit_s for one in steps) < pace_s
    assert sum(one.took_s > pace_s for one in steps[3:]) == 0


def test_a_leased_request_keeps_its_place_and_its_blocks(make: Make) -> None:
    scheduler = make(HorizonARScheduler, PROMISES | {"batch": 2}, slots=8)
    for name in ("s1", "s2", "s3", "s4"):
        scheduler.add_request(make_request(name, output_tokens=30))
    advanced: list[int] = []
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        advanced.append(len(output.num_scheduled_tokens))
        assert not output.preempted_req_ids
        answer(scheduler, output)
    assert max(advanced) == 2
    assert scheduler._lent > 30
    assert free_blocks(scheduler) == 2000 - 1


def test_lending_starts_nothing_that_blocks_do_not_last_for(make: Make) -> None:
    """Forty blocks hold ten requests of four; no preemption, however many wait."""
    scheduler = make(HorizonARScheduler, PROMISES | {"batch": 2}, slots=32, blocks=41)
    for index in range(30):
        scheduler.add_request(make_request(f"s{index}", prompt_tokens=16, output_tokens=40))
    most = 0
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        assert not output.preempted_req_ids
        answer(scheduler, output)
        most = max(most, len(scheduler.running))
    assert 8 <= most <= 10


@EVERY
def test_the_first_step_after_an_idle_time_is_planned_too(make: Make, cls: type) -> None:
    run = Virtual(make(cls, PROMISES, slots=8, token_budget=4096))
    for _ in range(20):
        run.add(f"s{len(run.lives)}", run.clock[0], 200, 5)
        while run.scheduler.has_unfinished_requests():
            run.step()
    # vLLM asks once more to hear who has finished.
    assert not run.scheduler.schedule().num_scheduled_tokens
    run.scheduler.add_request(make_request("s900", prompt_tokens=3_000))
    assert run.scheduler.schedule().total_num_scheduled_tokens < 1_000


@EVERY
def test_aborted_lenders_leave_nothing_behind(make: Make, cls: type) -> None:
    scheduler = make(cls, PROMISES | {"batch": 1}, slots=16, blocks=400)
    for index in range(12):
        scheduler.add_request(make_request(f"s{index}", output_tokens=50))
    for tick in range(60):
        step(scheduler)
        if tick % 5 == 4:
            scheduler.finish_requests(f"s{tick // 5}", RequestStatus.FINISHED_ABORTED)
    drain(scheduler)
    assert free_blocks(scheduler) == 399


@EVERY
def test_the_policy_may_change_at_any_step(make: Make, cls: type) -> None:
    scheduler = make(cls, PROMISES, slots=16)
    turns: list[dict[str, Any]] = [
        {"scheduler": "default"},
        {"scheduler": "horizon"},
        {"lending": False},
        {"scheduler": "edf"},
        {"scheduler": "horizon", "lending": True, "batch": 3},
    ]
    for tick in range(100):
        scheduler.add_request(make_request(f"{'sl'[tick % 2]}{tick}", output_tokens=20))
        if tick % 7 == 3:
            change = turns[tick // 7 % len(turns)]
            instance.request(instance.find(), lambda now, c=change: now.changed(c), wait_s=0)
        scheduler.now_s[0] += 0.05
        step(scheduler)
    drain(scheduler)
    assert free_blocks(scheduler) == 1999


def test_every_other_policy_finds_the_running_in_the_order_of_their_arrival(make: Make) -> None:
    scheduler = make(HorizonARScheduler, PROMISES | {"batch": 3}, slots=16)
    for index in range(8):
        scheduler.add_request(make_request(f"s{index}", output_tokens=90 - 10 * index))
        scheduler.now_s[0] += 0.1
        step(scheduler)
    for _ in range(20):
        scheduler.now_s[0] += 0.05
        step(scheduler)

    def names() -> list[str]:
        return [request.request_id for request in scheduler.running]

    assert len(names()) > 3 and names() != sorted(names())
    instance.request(instance.find(), lambda now: now.changed({"scheduler": "edf"}), wait_s=0)
    step(scheduler)
    assert names() == sorted(names())


def test_a_waiting_prompt_costs_what_the_prefix_cache_lacks(make: Make) -> None:
    scheduler = make(HorizonARScheduler, PROMISES, prefix_caching=True)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    first, second = (
        make_request(name, prompt_tokens=20 * BLOCK_TOKENS + 5, block_hasher=hasher)
        for name in ("s1", "s2")
    )
    scheduler.add_request(first)
    drain(scheduler)
    scheduler.add_request(second)
    job = job_of(second, Lengths(), scheduler)
    assert job is not None
    assert (job.context_tokens, job.tokens) == (20 * BLOCK_TOKENS, 5)


def test_a_hint_sets_the_promise_of_one_request(make: Make) -> None:
    scheduler = make(HorizonARScheduler, {"reading_ms": 80})
    scheduler.add_request(make_request("s1", extra_args={"tbt_ms": 33}))
    scheduler.add_request(make_request("s2"))
    scheduler.add_request(make_request("l1", extra_args={"tbt_ms": 33}))
    promised = [scheduler.requests[name].horizonserve_ticket.tbt_s for name in ("s1", "s2", "l1")]
    assert promised == [0.033, 0.08, float("inf")]


def test_without_a_target_the_promise_follows_the_machine(make: Make) -> None:
    settings = {"reading_ms": 10, "tbt_multiple": 2}
    run = Virtual(make(HorizonARScheduler, settings, slots=8, token_budget=4096))
    for _ in range(30):
        run.add(f"s{len(run.lives)}", run.clock[0], 20, 20)
        for _ in range(10):
            run.step()
    run.add("s900", run.clock[0], 20, 20)
    promised_s = run.scheduler.requests["s900"].horizonserve_ticket.tbt_s
    assert promised_s == pytest.approx(2 * 0.0336, rel=0.2)
