"""HALO and its baselines on the real scheduler classes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from engine import answer, drain, free_blocks, make_request, model_output, step
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from horizonserve import slo
from horizonserve.config import BASELINES
from horizonserve.policy.halo import Decodes
from horizonserve.policy.lending import Job
from horizonserve.serving.plain import HorizonAsyncScheduler, HorizonScheduler
from horizonserve.serving.schedulers import HorizonARAsyncScheduler, HorizonARScheduler
from horizonserve.serving.steps import job_of

pytestmark = pytest.mark.vllm
Make = Callable[..., Any]

CLASSES = [
    HorizonScheduler,
    HorizonAsyncScheduler,
    HorizonARScheduler,
    HorizonARAsyncScheduler,
]
SERVICES = {
    "services": {
        "triage": {"ttft_ms": 2_000, "tbt_ms": 200, "adapter": "triage-lora"},
        "records": {"ttft_ms": 1_000, "tbt_ms": 50},
    },
    "default": {"ttft_ms": 3_000, "tbt_ms": 100},
}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "services.yaml"
    path.write_text(yaml.safe_dump(SERVICES))
    monkeypatch.setenv("HORIZON_SERVICES", str(path))


def admitted(scheduler: Any, name: str, adapter: str | None = None, **hints: Any) -> Any:
    lora = LoRARequest(adapter, 1, "nowhere") if adapter else None
    scheduler.add_request(make_request(name, extra_args=hints or None, lora_request=lora))
    return scheduler.requests[name].horizonserve_ticket


def promises(ticket: Any) -> tuple[str, float, float]:
    return ticket.service, round(ticket.deadline_s - ticket.arrival_s, 6), ticket.tbt_s


def test_a_request_has_the_promises_of_its_service(make: Make, table: None) -> None:
    scheduler = make(HorizonScheduler, {"scheduler": "halo"}, loras=2)
    assert promises(admitted(scheduler, "a")) == ("default", 3.0, 0.1)
    assert promises(admitted(scheduler, "b", "triage-lora")) == ("triage", 2.0, 0.2)
    assert promises(admitted(scheduler, "c", "records")) == ("records", 1.0, 0.05)
    named = admitted(scheduler, "d", "records", service="triage", tbt_ms=70)
    assert promises(named) == ("triage", 2.0, 0.07)
    assert promises(admitted(scheduler, "e", ttft_ms=500)) == ("default", 0.5, 0.1)


def test_a_service_that_does_not_exist_costs_no_request(
    make: Make, table: None, vllm_log: pytest.LogCaptureFixture
) -> None:
    scheduler = make(HorizonScheduler, {"scheduler": "halo"})
    assert promises(admitted(scheduler, "a", service="x")) == ("default", 3.0, 0.1)
    assert "service='x'" in vllm_log.text


def test_the_table_is_for_halo_and_its_baselines_alone(make: Make, table: None) -> None:
    scheduler = make(HorizonScheduler, {"scheduler": "horizon", "slo_text_ms": 700})
    assert promises(admitted(scheduler, "a"))[1] == 0.7


def test_capacity_bounds_who_enters(make: Make, table: None) -> None:
    scheduler = make(HorizonScheduler, {"scheduler": "halo", "token_budget": 4}, slots=16)
    for index in range(12):
        admitted(scheduler, f"s{index}", service="triage")  # a quarter of a place each
        admitted(scheduler, f"r{index}", service="records")
    for _ in range(10):
        step(scheduler)
    used = sum(1.0 if r.request_id[0] == "r" else 0.25 for r in scheduler.running)
    assert used <= 4.0 and len(scheduler.running) >= 4
    drain(scheduler)


def test_whoever_has_time_in_the_bank_sits_out(make: Make, table: None) -> None:
    scheduler = make(HorizonScheduler, {"scheduler": "halo", "token_budget": 8}, slots=16)
    for index in range(6):
        scheduler.add_request(make_request(f"s{index}", output_tokens=200))
    while any(not r.num_output_tokens for r in scheduler.requests.values()):
        step(scheduler)
    scheduler.add_request(make_request("new", prompt_tokens=40, output_tokens=2))
    steps = 0
    while not scheduler.requests["new"].num_output_tokens:
        step(scheduler)
        steps += 1
    # 40 tokens in steps of 8: with six decodes beside it a step would have had 2 for it.
    assert steps == 5 and scheduler._lent > 0
    drain(scheduler)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_policy_may_change_at_any_step(make: Make, table: None, cls: type) -> None:
    scheduler = make(cls, {"scheduler": "halo"}, slots=6, token_budget=64, blocks=120)
    free = free_blocks(scheduler)
    chance = random.Random(1)
    for index in range(120):
        if index % 4 == 0:
            name = chance.choice(["halo", "horizon", "edf", "default", *BASELINES])
            changes = {"scheduler": name, "dynamic_budget": chance.random() < 0.5}
            scheduler._use(scheduler._settings.changed(changes))
        service = chance.choice(["triage", "records"])
        scheduler.add_request(
            make_request(
                f"s{index}",
                prompt_tokens=chance.randint(1, 90),
                output_tokens=chance.randint(1, 12),
                extra_args={"service": service},
            )
        )
        scheduler.now_s[0] += 0.02
        step(scheduler)
    drain(scheduler)
    assert free_blocks(scheduler) == free and not scheduler.requests


def test_qoserve_cuts_its_batch_to_the_strictest_promise(make: Make, table: None) -> None:
    scheduler = make(HorizonScheduler, {"scheduler": "qoserve"}, slots=8, token_budget=2_048)
    scheduler.add_request(make_request("s0", output_tokens=400, extra_args={"service": "records"}))
    for index in range(60):
        # 10 ms and 0.1 ms a token.
        scheduler.add_request(make_request(f"p{index}", prompt_tokens=50 * (index % 8) + 1))
        output = scheduler.schedule()
        scheduler.now_s[0] += 0.010 + 1e-4 * output.total_num_scheduled_tokens
        answer(scheduler, output)
    scheduler.add_request(make_request("long", prompt_tokens=3_000))
    output = scheduler.schedule()
    assert 200 <= output.total_num_scheduled_tokens <= 420  # 45 ms of 50


@pytest.mark.parametrize(("lost", "first"), [("demote", "new"), ("protect", "old")])
def test_who_is_late_whatever_is_done_goes_last(
    make: Make, table: None, lost: str, first: str
) -> None:
    settings = {"scheduler": "halo", "token_budget": 1, "lost": lost}
    scheduler = make(HorizonScheduler, settings, slots=4)
    admitted(scheduler, "old", service="records")
    scheduler.now_s[0] += 3.0
    admitted(scheduler, "new", service="records")
    output = scheduler.schedule()
    assert list(output.num_scheduled_tokens) == [first]


def split(scheduler: Any) -> tuple[list[Any], Decodes, list[Job]]:
    """Who generates, what is known of them, and the prompts, as an iteration sees them."""
    found: tuple[list[Any], Decodes, list[Job]] = scheduler._split(scheduler._halo)
    return found


def test_tokens_under_way_are_in_the_bank(make: Make, table: None) -> None:
    scheduler = make(HorizonAsyncScheduler, {"scheduler": "halo"}, slots=4)
    scheduler.add_request(make_request("a", output_tokens=9, extra_args={"service": "records"}))
    deadline_s = scheduler.requests["a"].horizonserve_ticket.deadline_s
    under_way = [scheduler.schedule()]
    generating, decodes, prefills = split(scheduler)
    assert not prefills and len(generating) == 1
    # The first token is under way: it will be released at the deadline.
    assert decodes.released_s[0] == pytest.approx(deadline_s)
    under_way.append(scheduler.schedule())
    assert split(scheduler)[1].released_s[0] == pytest.approx(deadline_s + 0.05)
    answer(scheduler, under_way[0])
    assert split(scheduler)[1].released_s[0] == pytest.approx(deadline_s + 0.05)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_noted_of_streams_is_what_vllm_and_the_tickets_say(
    make: Make, table: None, cls: type, seed: int
) -> None:
    """Under KV pressure, forced preemptions, aborts and changes of policy."""
    chance = random.Random(seed)
    scheduler = make(cls, {"scheduler": "halo"}, slots=12, token_budget=64, blocks=60)
    under_way: deque[tuple[Any, ModelRunnerOutput]] = deque()
    ahead = 1 + seed % 2 if "Async" in cls.__name__ else 0
    seen = preempted = 0
    #: R_g by request, one token after the other.
    released_s: dict[str, float] = {}
    for index in range(400):
        if index < 300 and len(scheduler.requests) < 24:
            scheduler.add_request(
                make_request(
                    f"{chance.choice('ssl')}{index}",
                    prompt_tokens=chance.randint(1, 150),
                    output_tokens=chance.randint(1, 40),
                    extra_args={"service": chance.choice(["triage", "records"])},
                )
            )
        if chance.random() < 0.05:
            name = chance.choice(list(scheduler.requests))
            scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        if chance.random() < 0.05 and scheduler.running:
            # It may come back at once, before its tokens under way.
            scheduler._preempt_request(scheduler.running.pop(), 0.0)
        if chance.random() < 0.02:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        if chance.random() < 0.05:
            name = chance.choice(["default", "halo", "halo", "edf"])
            scheduler._use(scheduler._settings.changed({"scheduler": name}))
        if scheduler._halo is not None:
            seen += agrees(scheduler, released_s)
        output = scheduler.schedule()
        preempted += len(output.preempted_req_ids or ())
        under_way.append((output, model_output(scheduler, output)))
        scheduler.now_s[0] += chance.choice([0.01, 0.03, 0.1])
        while len(under_way) > ahead:
            note_tokens(scheduler, released_s, *under_way.popleft())
        if not scheduler.requests:
            break
        for request in scheduler.requests.values() if scheduler._halo is None else ():
            # Every other policy finds it in the ticket.
            ticket = request.horizonserve_ticket
            if ticket.path is slo.Path.SHORT and ticket.released_s is not None:
                assert ticket.released_s == pytest.approx(released_s[request.request_id])
    assert not scheduler.requests and seen > 200 and preempted > 10
    scheduler._use(scheduler._settings.changed({"scheduler": "halo"}))
    assert not split(scheduler)[0]


def note_tokens(scheduler: Any, released_s: dict[str, float], output: Any, made: Any) -> None:
    """Let a step end; R_k = max(G_k, R_(k-1) + TBT)."""
    had = [
        (scheduler.requests[n], scheduler.requests[n].num_output_tokens)
        for n in made.req_ids
        if n in scheduler.requests
    ]
    scheduler.update_from_output(output, made)
    for request, before in had:
        for _ in range(request.num_output_tokens - before):
            ticket, name = request.horizonserve_ticket, request.request_id
            due_s = ticket.deadline_s
            if name in released_s:
                due_s = released_s[name] + ticket.tbt_s
            released_s[name] = max(scheduler.now_s[0], due_s)


def agrees(scheduler: Any, released_s: dict[str, float]) -> int:
    """How many requests generate; each is asked by itself."""
    generating, decodes, prefills = split(scheduler)
    at = {request: index for index, request in enumerate(generating)}
    prompts = {job.request for job in prefills}
    assert prompts.isdisjoint(at)
    for request in scheduler.running:
        job = job_of(request, scheduler._lengths, scheduler)
        if job is None:
            continue  # all that it may generate is under way
        assert job.decode == (request in at), request
        if not job.decode:
            assert request in prompts
            continue
        last_s, tbt_s, context_tokens = (column[at[request]] for column in decodes)
        if job.ticket.path is slo.Path.LONG:
            assert (last_s, tbt_s) == (-np.inf, 0.05)
        else:
            assert tbt_s == job.ticket.tbt_s
            before_s = job.ticket.deadline_s - tbt_s
            known_s = released_s.get(request.request_id, before_s)
            assert last_s == pytest.approx(known_s + job.in_flight * tbt_s)
        # Tokens of steps before a preemption are computed again.
        assert abs(context_tokens - job.context_tokens) <= 3
    return len(at)


def test_rows_of_streams_are_used_again(make: Make, table: None) -> None:
    scheduler = make(HorizonScheduler, {"scheduler": "halo"}, slots=100, token_budget=512)
    for round_ in range(3):
        for index in range(100):
            scheduler.add_request(make_request(f"s{round_}-{index}", output_tokens=8))
        drain(scheduler)
        assert (
            len(scheduler._halo.streams.released_s) == 130
            and np.isnan(scheduler._halo.streams.released_s).all()
        )


@pytest.mark.parametrize("cls", CLASSES)
def test_a_baseline_counts_a_late_request_once_whatever_it_is_for(make: Make, cls: type) -> None:
    scheduler = make(cls, {"scheduler": "vtc-r"}, slots=8)
    for name, path in (("text", slo.Path.SHORT), ("speech", slo.Path.LONG)):
        ticket = admitted(scheduler, name, ttft_ms=100)
        ticket.service, ticket.path = name, path
    scheduler.now_s[0] += 1.0
    drain(scheduler)
    assert scheduler._baseline._late == {"text": 1, "speech": 1}
