"""The view on the real scheduler classes: step tables, restoring, and what must never change."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from engine import (
    answer,
    drain,
    free_blocks,
    make_request,
    make_scheduler,
    queued,
    step,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus
from vllm_omni.core.sched.omni_ar_scheduler import OmniARAsyncScheduler, OmniARScheduler

from horizonserve import instance
from horizonserve.serving.plain import HorizonScheduler
from horizonserve.serving.queue_view import QueueView
from horizonserve.serving.schedulers import HorizonARAsyncScheduler, HorizonARScheduler

pytestmark = pytest.mark.vllm
Make = Callable[..., Any]

BOTH = pytest.mark.parametrize("cls", [HorizonARScheduler, HorizonARAsyncScheduler])


def add(scheduler: Any, names: str, **kwargs: Any) -> None:
    for name in names.split():
        scheduler.add_request(make_request(name, **kwargs))


def test_the_view_sits_between_omni_and_the_stock_loop() -> None:
    order = HorizonARAsyncScheduler.__mro__
    assert order.index(OmniARScheduler) < order.index(QueueView) < order.index(Scheduler)
    assert issubclass(HorizonARAsyncScheduler, OmniARAsyncScheduler)


def table(scheduler: Any, names: str, steps: int, **kwargs: Any) -> list[str]:
    """Per step what ran for the first time; nothing ever finishes."""
    add(scheduler, names, output_tokens=1000, **kwargs)
    return [" ".join(step(scheduler)) for _ in range(steps)]


def test_default_admits_in_arrival_order(make: Make) -> None:
    scheduler = make(HorizonARScheduler, {"scheduler": "default"}, slots=3)
    assert table(scheduler, "l1 l2 s1 l3 s2", 2) == ["l1 l2 s1", ""]


def test_edf_admits_by_first_response_deadline(make: Make) -> None:
    scheduler = make(HorizonARScheduler, {"scheduler": "edf"}, slots=3)
    assert table(scheduler, "l1 l2 s1 l3 s2", 2) == ["s1 s2 l1", ""]


def test_horizon_rotates_and_caps(make: Make) -> None:
    literal = {"lending": False, "slo_multiple": 10}
    scheduler = make(HorizonARScheduler, literal, slots=6, token_budget=8)
    # One 8-token prompt fits a step beside nothing else, so every step admits one request.
    rows = []
    add(scheduler, "l1 l2 l3 l4 s1 s2 s3", output_tokens=1)
    for _ in range(7):
        rows.append((" ".join(step(scheduler)), len(scheduler.running)))
    # Two short steps, two long ones, two short ones; then only long requests wait.
    assert [row[0] for row in rows] == ["s1", "s2", "l1", "l2", "s3", "l3", "l4"]


def test_a_long_burst_leaves_slots_for_short_requests(make: Make) -> None:
    """vllm#40004: nothing that runs is preempted, so the cap must keep a slot."""
    scheduler = make(HorizonARScheduler, {"long_cap_requests": 3}, slots=4)
    add(scheduler, "s0", output_tokens=1)
    step(scheduler)
    add(scheduler, "l1 l2 l3 l4 l5 l6", output_tokens=500)
    step(scheduler)
    assert len(scheduler.running) == 3
    add(scheduler, "s1", output_tokens=1)
    assert step(scheduler) == ["s1"]


def test_without_short_traffic_no_slot_is_kept(make: Make) -> None:
    scheduler = make(HorizonARScheduler, {"long_cap_requests": 1}, slots=4)
    add(scheduler, "l1 l2 l3 l4 l5", output_tokens=500)
    step(scheduler)
    assert len(scheduler.running) == 4


@BOTH
def test_nothing_runs_longer_hidden_than_max_hide_s(make: Make, cls: type) -> None:
    # A far deadline, so that the guard has nothing to do with it.
    far = {"long_cap_requests": 1, "max_hide_s": 5, "slo_audio_ms": 600_000}
    scheduler = make(cls, far, slots=4)
    add(scheduler, "s0 l0", output_tokens=5000)
    step(scheduler)
    add(scheduler, "l1 l2", output_tokens=5000)
    entered: dict[str, float] = {}
    for tick in range(80):
        scheduler.now_s[0] = 1000.0 + tick / 10
        scheduler.add_request(make_request(f"s{tick + 1}", output_tokens=1))
        for name in step(scheduler):
            entered[name] = tick / 10
    # Seen from then on, it enters in one of the next steps that has a token for it.
    assert 4.9 <= entered["l1"] <= 5.6
    assert "l2" not in entered


def test_lost_requests_are_served_last_but_served(make: Make) -> None:
    scheduler = make(HorizonARScheduler, {"slo_text_ms": 1000}, slots=1)
    add(scheduler, "s1 s2", output_tokens=1)
    scheduler.now_s[0] += 2.0
    add(scheduler, "s3", output_tokens=1)
    assert [step(scheduler) for _ in range(3)] == [["s3"], ["s1"], ["s2"]]


@BOTH
def test_default_is_the_stock_scheduler_step_for_step(make: Make, cls: type) -> None:
    """The same seeded life, with KV pressure and aborts, on both; every output is compared."""
    base = OmniARAsyncScheduler if cls is HorizonARAsyncScheduler else OmniARScheduler
    ours = make(cls, {"scheduler": "default"}, slots=6, blocks=40, token_budget=64)
    stock = make_scheduler(base, slots=6, blocks=40, token_budget=64)
    rng = random.Random(3)
    for tick in range(400):
        if rng.random() < 0.4:
            name = f"{rng.choice('sl')}{tick}"
            size, tokens = rng.randint(1, 90), rng.randint(1, 40)
            for scheduler in (ours, stock):
                scheduler.add_request(
                    make_request(name, prompt_tokens=size, output_tokens=tokens, arrival_time=tick)
                )
        if rng.random() < 0.05 and stock.requests:
            victim = rng.choice(sorted(stock.requests))
            for scheduler in (ours, stock):
                scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
        outputs = [scheduler.schedule() for scheduler in (ours, stock)]
        assert outputs[0].num_scheduled_tokens == outputs[1].num_scheduled_tokens
        assert outputs[0].preempted_req_ids == outputs[1].preempted_req_ids
        assert queued(ours) == queued(stock)
        for scheduler, output in zip((ours, stock), outputs, strict=True):
            answer(scheduler, output)
    assert drain(ours) == drain(stock)


@BOTH
def test_slots_and_tokens_are_lowered_and_restored_live(make: Make, cls: type) -> None:
    scheduler = make(cls, slots=4, token_budget=64)
    add(scheduler, "s1 s2 s3 s4 s5 s6", output_tokens=3)
    step(scheduler)
    assert len(scheduler.running) == 4
    found = instance.find()
    instance.request(found, found.settings.changed({"slots": 1, "token_budget": 8}), wait_s=0)
    output = scheduler.schedule()
    # Those that run are not evicted, and nobody else enters.
    assert len(scheduler.running) == 4
    assert output.total_num_scheduled_tokens <= 8
    assert instance.find().applied
    answer(scheduler, output)
    while scheduler.requests:
        step(scheduler)
        assert len(scheduler.running) <= 4
        if len(scheduler.running) < 2:
            break
    entered = []
    add(scheduler, "s7 s8", output_tokens=1)
    for _ in range(12):
        entered += [step(scheduler)]
        assert all(len(names) <= 1 for names in entered)
    found = instance.find()
    instance.request(found, found.settings.changed({"slots": 99, "token_budget": 10**6}), wait_s=0)
    scheduler.schedule()
    assert scheduler.max_num_running_reqs == 4
    assert scheduler.max_num_scheduled_tokens == 64


@pytest.mark.parametrize("policy", ["edf", "horizon"])
def test_an_exception_in_the_stock_loop_loses_nothing(
    make: Make, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make(HorizonARScheduler, {"scheduler": policy}, slots=8)
    add(scheduler, "l1 s1 l2 s2 l3 s3")
    waiting, before = scheduler.waiting, queued(scheduler)
    manager, calls = scheduler.kv_cache_manager, [0]
    allocate = manager.allocate_slots

    def fail_at_the_second(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("planned")
        return allocate(*args, **kwargs)

    monkeypatch.setattr(manager, "allocate_slots", fail_at_the_second)
    with pytest.raises(RuntimeError, match="planned"):
        scheduler.schedule()
    assert scheduler.waiting is waiting
    (running,) = [request.request_id for request in scheduler.running]
    assert queued(scheduler) == [name for name in before if name != running]
    assert scheduler.get_num_unfinished_requests() == 6


def test_preempted_work_returns_ahead_of_the_hidden(make: Make) -> None:
    """KV runs out while others are hidden: the preempted request is first in the queue."""
    scheduler = make(HorizonARScheduler, slots=8, blocks=9, token_budget=64)
    add(scheduler, "s1 s2", prompt_tokens=32, output_tokens=60)
    step(scheduler)
    add(scheduler, "l1 l2 s3", prompt_tokens=32, output_tokens=2)
    preempted = None
    for _ in range(80):
        output = scheduler.schedule()
        if output.preempted_req_ids:
            preempted = set(output.preempted_req_ids)
            break
        answer(scheduler, output)
    assert preempted
    assert queued(scheduler)[0] in preempted
    answer(scheduler, output)
    drain(scheduler)


def test_a_companion_shares_its_parents_fate(make: Make) -> None:
    scheduler = make(HorizonARScheduler, {"long_cap_requests": 1, "scheduler": "horizon"}, slots=8)
    add(scheduler, "s0", output_tokens=500)
    add(scheduler, "l1 l2", output_tokens=500)
    for parent in ("l1", "l2"):
        companion = make_request(f"{parent}__cfg_text", final_stage=0, companion=True)
        scheduler.add_request(companion)
    tickets = {name: r.horizonserve_ticket for name, r in scheduler.requests.items()}
    assert tickets["l1"] is tickets["l1__cfg_text"]
    entered = set(step(scheduler))
    entered |= set(step(scheduler))
    entered |= set(step(scheduler))
    # The cap of one admits one group, parent and companion, and hides the other whole.
    assert entered == {"s0", "l1", "l1__cfg_text"}
    late = make_request("l1__cfg_img", final_stage=0, companion=True)
    scheduler.add_request(late)
    assert step(scheduler) == ["l1__cfg_img"]


def test_a_companion_is_not_hidden_by_its_own_parent(make: Make) -> None:
    """One slot is free when the group comes; the parent takes it and then fills the cap."""
    scheduler = make(HorizonARScheduler, {"long_cap_requests": 1}, slots=2)
    add(scheduler, "s0", output_tokens=2)
    step(scheduler)
    add(scheduler, "l1", output_tokens=500)
    scheduler.add_request(make_request("l1__cfg", final_stage=0, companion=True))
    assert step(scheduler) == ["l1"]
    add(scheduler, "s1", output_tokens=1)
    assert "l1__cfg" in step(scheduler) + step(scheduler)


def test_a_session_that_returns_to_the_queue_is_seen(make: Make) -> None:
    """vLLM-Omni moves a parked session back with its history, the queues' lengths unchanged."""
    scheduler = make(HorizonARScheduler, {"long_cap_requests": 1}, slots=3)
    add(scheduler, "s0 l0", output_tokens=500)
    session = make_request("l9", output_tokens=1, resumable=True)
    scheduler.add_request(session)
    for _ in range(6):
        scheduler.now_s[0] += 6
        step(scheduler)
    assert session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    add(scheduler, "l1", output_tokens=500)
    step(scheduler)
    scheduler.skipped_waiting.remove_request(session)
    session.status = RequestStatus.WAITING
    session.num_computed_tokens = 0
    scheduler.num_waiting_for_streaming_input = 0
    scheduler.waiting.add_request(session)
    output = scheduler.schedule()
    assert "l9" in output.num_scheduled_tokens


def test_a_swap_in_the_queue_that_keeps_its_length_is_noticed(make: Make) -> None:
    """One request is aborted and another preempted between two looks at the queue."""
    scheduler = make(HorizonARScheduler, {"scheduler": "edf"}, slots=1)
    add(scheduler, "s0", output_tokens=500)
    step(scheduler)
    add(scheduler, "s1 s2 s3")
    scheduler._fresh.sync(scheduler.waiting, scheduler.skipped_waiting, scheduler.running)
    scheduler.finish_requests("s2", RequestStatus.FINISHED_ABORTED)
    preempted = scheduler.running.pop()
    scheduler._preempt_request(preempted, 0.0)
    assert queued(scheduler) == ["s0", "s1", "s3"]
    output = scheduler.schedule()
    assert list(output.num_scheduled_tokens) == ["s0"]


def test_with_priority_scheduling_the_users_order_rules_what_is_visible(make: Make) -> None:
    from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue

    scheduler = make(HorizonARScheduler, {"long_cap_requests": 1}, slots=2)
    scheduler.policy = SchedulingPolicy.PRIORITY
    scheduler._passes_over = True
    scheduler.waiting = create_request_queue(scheduler.policy)
    scheduler.skipped_waiting = create_request_queue(scheduler.policy)
    for name, priority in (("s1", 5), ("s2", 1), ("s3", 3)):
        scheduler.add_request(make_request(name, priority=priority, output_tokens=1))
    assert [step(scheduler) for _ in range(2)] == [["s2", "s3"], ["s1"]]
    life(scheduler, [("add", n) for n in range(9)] + [("step", 0), ("abort", 3), ("fail", 0)] * 5)
    drain(scheduler)


def test_a_stage_that_cannot_split_prompts_keeps_its_token_budget(make: Make) -> None:
    scheduler = make(HorizonARScheduler, {"token_budget": 8}, token_budget=64)
    assert scheduler.max_num_scheduled_tokens == 8
    scheduler._min_tokens = scheduler._max_tokens  # as without chunked prefill
    scheduler._use(scheduler._settings)
    assert scheduler.max_num_scheduled_tokens == 64


def test_an_abort_while_hidden_leaves_no_trace(make: Make) -> None:
    scheduler = make(HorizonARScheduler, {"long_cap_requests": 1}, slots=4)
    add(scheduler, "s0 l0", output_tokens=500)
    step(scheduler)
    add(scheduler, "l1 l2 l3")
    step(scheduler)
    assert "l2" in queued(scheduler)
    # vLLM-Omni may leave an aborted request in the queue (vllm-omni#5721).
    scheduler.requests["l2"].status = RequestStatus.FINISHED_ABORTED
    scheduler.finish_requests("l1", RequestStatus.FINISHED_ABORTED)
    for _ in range(10):
        scheduler.now_s[0] += 1
        step(scheduler)
    assert "l1" not in queued(scheduler)
    assert "l2" not in queued(scheduler)


def test_counts_include_the_hidden_while_a_step_runs(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make(HorizonARScheduler, {"long_cap_requests": 1}, slots=4)
    add(scheduler, "s0 l0", output_tokens=500)
    step(scheduler)
    add(scheduler, "l1 l2 s1")
    seen = []
    start = scheduler.kv_cache_manager.new_step_starts

    def look() -> None:
        seen.append((scheduler.get_num_unfinished_requests(), len(scheduler.waiting)))
        start()

    monkeypatch.setattr(scheduler.kv_cache_manager, "new_step_starts", look)
    scheduler.schedule()
    assert seen == [(5, 1)]  # behind the view only s1 waits
    assert scheduler.get_request_counts() == (3, 2)


def test_one_slot_is_warned_about(make: Make, vllm_log: pytest.LogCaptureFixture) -> None:
    make(HorizonARScheduler, slots=1)
    assert "max_num_seqs=1" in vllm_log.text
    vllm_log.clear()
    make(HorizonARScheduler, slots=2)
    assert "max_num_seqs=" not in vllm_log.text


def test_plain_vllm_serves_by_deadline(make: Make) -> None:
    scheduler = make(HorizonScheduler, {"scheduler": "edf"}, slots=1)
    scheduler.add_request(make_request("s1", output_tokens=1))
    scheduler.add_request(make_request("s2", output_tokens=1, extra_args={"slo_ms": 50}))
    assert step(scheduler) == ["s2"]


operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "abort", "step", "step", "fail", "finish", "later"]),
        st.integers(0, 10**6),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations, st.sampled_from(["edf", "horizon"]), st.sampled_from(["demote", "protect"]))
def test_the_waiting_order_is_arrival_order_whatever_happens(
    make: Make, drawn: list[tuple[str, int]], policy: str, lost: str
) -> None:
    """Stash and restore is the identity on order: fresh requests leave the queue, never move."""
    scheduler = make(
        HorizonARScheduler, {"scheduler": policy, "lost": lost}, slots=3, blocks=24, token_budget=48
    )
    life(scheduler, drawn)
    fresh = [r for r in scheduler.waiting if r.status is RequestStatus.WAITING]
    numbers = [int(r.request_id[1:]) for r in fresh]
    assert numbers == sorted(numbers)


def life(scheduler: Any, drawn: list[tuple[str, int]]) -> None:
    """Apply operations; after each, no request is lost, doubled or miscounted."""
    waiting, skipped = scheduler.waiting, scheduler.skipped_waiting
    for number, (operation, draw) in enumerate(drawn):
        if operation == "add":
            name = f"{'sl'[draw % 2]}{number}"
            size, tokens = 1 + draw % 70, 1 + draw % 30
            scheduler.add_request(make_request(name, prompt_tokens=size, output_tokens=tokens))
        elif operation in ("abort", "finish") and scheduler.requests:
            name = sorted(scheduler.requests)[draw % len(scheduler.requests)]
            status = RequestStatus.FINISHED_ABORTED
            if operation == "finish":
                status = RequestStatus.FINISHED_STOPPED
            scheduler.finish_requests(name, status)
        elif operation == "later":
            scheduler.now_s[0] += draw % 7
        elif operation == "step":
            step(scheduler)
        elif operation == "fail":
            fail_once(scheduler, draw)
        names = [r.request_id for r in scheduler.running] + queued(scheduler)
        assert sorted(names) == sorted(scheduler.requests)
        assert scheduler.waiting is waiting
        assert scheduler.skipped_waiting is skipped
        assert scheduler.get_num_unfinished_requests() == len(names)
        counts = len(scheduler.running), len(queued(scheduler))
        assert scheduler.get_request_counts() == counts


def fail_once(scheduler: Any, draw: int) -> None:
    """A step whose stock loop raises, before it has touched anything that it cannot undo."""
    manager = scheduler.kv_cache_manager
    start = manager.new_step_starts

    def fail() -> None:
        raise RuntimeError("planned")

    manager.new_step_starts = fail
    try:
        with pytest.raises(RuntimeError, match="planned"):
            scheduler.schedule()
    finally:
        manager.new_step_starts = start


@pytest.mark.parametrize("policy", ["default", "edf", "horizon"])
@BOTH
def test_ten_thousand_random_operations_lose_nothing(make: Make, cls: type, policy: str) -> None:
    scheduler = make(cls, {"scheduler": policy}, slots=5, blocks=60, token_budget=64)
    blocks = free_blocks(scheduler)
    rng = random.Random(17)
    kinds = ["add"] * 3 + ["step"] * 8 + ["abort", "finish", "later", "fail"]
    done = 0
    while done < 10_000:
        chunk = [(rng.choice(kinds), rng.randrange(10**6)) for _ in range(500)]
        # Numbers name requests, so each chunk starts on an empty scheduler.
        life(scheduler, chunk)
        drain(scheduler)
        assert free_blocks(scheduler) == blocks
        assert not scheduler.requests
        done += len(chunk)
    stats = scheduler.make_stats()
    assert stats is None or (stats.num_running_reqs, stats.num_waiting_reqs) == (0, 0)
