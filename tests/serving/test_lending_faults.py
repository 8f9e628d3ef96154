"""Requests that wait behind the plan's back: sessions that go on, and blocked ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from engine import answer, make_request
from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus, StreamingUpdate

from horizonserve.policy.lending import Job, Plan
from horizonserve.serving.plain import HorizonScheduler

pytestmark = pytest.mark.vllm
Make = Callable[..., Any]


def step(scheduler: Any) -> list[str]:
    """One step of a tenth of a second; returns who took part."""
    output = scheduler.schedule()
    scheduler.now_s[0] += 0.1
    answer(scheduler, output)
    return list(output.num_scheduled_tokens)


def blocked(name: str, **fields: Any) -> Any:
    """A request as it is once what blocked it (a grammar, a session's client) is there."""
    request = make_request(name, **fields)
    request.status = RequestStatus.WAITING_FOR_STREAMING_REQ
    return request


def unblock(scheduler: Any, request: Any) -> None:
    """The session's next chunk comes, the way vLLM's ``add_request`` takes it."""
    scheduler.num_waiting_for_streaming_input += 1
    update = StreamingUpdate(
        mm_features=None,
        prompt_token_ids=[5] * 8,
        max_tokens=20,
        arrival_time=0.0,
        sampling_params=request.sampling_params,
    )
    scheduler._update_request_as_session(request, update)


@pytest.mark.parametrize("lending", [False, True])
def test_a_session_that_goes_on_enters_while_others_decode(make: Make, lending: bool) -> None:
    """The plan's tokens are all the step has; those outside the plan must get some too."""
    scheduler = make(HorizonScheduler, {"lending": lending}, slots=8)
    session = blocked("s-session", output_tokens=20)
    scheduler.add_request(session)
    for i in range(3):
        scheduler.add_request(make_request(f"s{i}", output_tokens=400))
    for _ in range(3):
        step(scheduler)
    unblock(scheduler, session)
    # It has computed tokens before, so it is not fresh.
    session.horizonserve_ticket.started = True
    assert any("s-session" in step(scheduler) for _ in range(100))


@pytest.mark.parametrize("waits", [False, True])
def test_the_stream_of_a_session_that_goes_on_begins_anew(make: Make, waits: bool) -> None:
    """Under HALO; its next input comes while it still generates, or later."""
    scheduler = make(HorizonScheduler, {"scheduler": "halo"}, slots=4)
    session = make_request("session", output_tokens=6, resumable=True)
    scheduler.add_request(session)
    for _ in range(8 if waits else 4):
        step(scheduler)
    assert session.horizonserve_row and session.num_output_tokens == (6 if waits else 4)
    assert (session.status is RequestStatus.WAITING_FOR_STREAMING_REQ) == waits
    scheduler.now_s[0] += 5.0 * waits
    scheduler.add_request(make_request("session", output_tokens=6, resumable=True))
    while session.num_output_tokens != 1:
        step(scheduler)
    ticket, released_s = session.horizonserve_ticket, scheduler._halo.streams.released_s
    assert ticket.deadline_s > scheduler.now_s[0]
    assert released_s[session.horizonserve_row] == ticket.deadline_s


class SecondSitsOut:
    """A valid plan: while two run, the second sits out."""

    def plan(self, running: Sequence[Job], waiting: Sequence[Job], now_s: float) -> Plan:
        lent = [*running[1:]] if len(running) == 2 else []
        return Plan([job for job in running if job not in lent], lent, [*waiting], 64, 1.0, 0)


def test_a_session_brings_no_adapter_too_many(make: Make) -> None:
    """vLLM asserts max_loras over those in a step; the view lets what is not fresh pass."""
    scheduler = make(HorizonScheduler, slots=8, loras=2)
    adapters = [LoRARequest(f"adapter {i}", i, "nowhere") for i in (1, 2, 3)]
    session = blocked("s3", output_tokens=20, lora_request=adapters[2])
    scheduler.add_request(session)
    for i in range(2):
        scheduler.add_request(make_request(f"s{i}", output_tokens=50, lora_request=adapters[i]))
    step(scheduler)
    scheduler._lending = SecondSitsOut()
    unblock(scheduler, session)
    session.horizonserve_ticket.started = True
    for _ in range(80):
        step(scheduler)
