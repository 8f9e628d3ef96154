"""Steps of vLLM's scheduler: what they hold, how long they took, who may join the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm.v1.request import RequestStatus

from horizonserve.policy.batch import Load, StepModel
from horizonserve.policy.lending import Job
from horizonserve.policy.lengths import Lengths

_COMPUTABLE = (RequestStatus.RUNNING, RequestStatus.WAITING, RequestStatus.PREEMPTED)


def job_of(request: Any, lengths: Lengths, scheduler: Any) -> Job | None:
    """A running or waiting request as a step sees it; None when a step can do nothing for it."""
    if request.next_decode_eligible_step > scheduler.current_step + 1:
        return None  # its last token is still on its way through a pipeline
    if request.status not in _COMPUTABLE and not _unblocked(request, scheduler):
        return None
    placeholders = request.num_output_placeholders
    drafts = len(request.spec_token_ids)
    generated = request.num_output_tokens + placeholders
    context_tokens = request.num_computed_tokens
    tokens = request.num_tokens_with_spec + placeholders - context_tokens
    if tokens <= 0:
        return None
    ticket = request.horizonserve_ticket
    runs = request.status is RequestStatus.RUNNING
    if not runs and context_tokens == 0:
        # What vLLM will find in the prefix cache, if that is on.
        context_tokens = scheduler.kv_cache_manager.get_computed_blocks(request)[1]
        tokens -= context_tokens
    return Job(
        request,
        ticket,
        tokens,
        context_tokens,
        generated,
        lengths.to_generate(ticket.request_class, generated, request.max_tokens - generated),
        # Every step under way holds a token and its drafts.
        -(-placeholders // (1 + drafts)),
        decode=runs and generated > 0 and tokens <= 1 + drafts,
        runs=runs,
    )


def _unblocked(request: Any, scheduler: Any) -> bool:
    """Whether vLLM will find, when it looks, that a blocked request can go on."""
    if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        grammar = request.structured_output_request
        return grammar is not None and bool(grammar.is_grammar_ready)
    return request.request_id in scheduler.finished_recving_kv_req_ids


def load_of(output: Any, requests: Mapping[str, Any], co_run: bool) -> Load:
    """What a scheduled step computes; ``co_run``: whether a stage downstream works beside it."""
    decodes = prefill_tokens = 0
    attention = 0.0
    drafts = output.scheduled_spec_decode_tokens
    for name, tokens in output.num_scheduled_tokens.items():
        context_tokens = requests[name].num_computed_tokens - tokens
        attention += tokens * (context_tokens + tokens / 2)
        if tokens <= 1 + len(drafts.get(name, ())):
            decodes += 1
        else:
            prefill_tokens += tokens
    return Load(decodes, prefill_tokens, attention, co_run)


class StepClock:
    """Measures steps and teaches the model; times on the given clock.

    A step takes from the end of the one before to its own end, the engine's loop included; the
    first after an idle time takes from when it was scheduled. Asynchronous scheduling has two
    steps under way.
    """

    def __init__(self, model: StepModel, clock: Callable[[], float]) -> None:
        self._model = model
        self._clock = clock
        #: (scheduled tokens of the step, when it was scheduled, its load), oldest first.
        self._under_way: deque[tuple[object, float, Load]] = deque()
        self._ended_s: float | None = None
        self._busy_until_s = 0.0

    def start_s(self) -> float:
        """When a step that is scheduled now will start."""
        now_s = self._clock()
        return max(now_s, self._busy_until_s) if self._under_way else now_s

    def scheduled(self, output: Any, load: Load, start_s: float) -> None:
        """A step is on its way, and will start then."""
        self._busy_until_s = start_s + self._model.step_s(load)
        self._under_way.append((output.num_scheduled_tokens, self._clock(), load))

    def ended(self, output: Any, idle: bool) -> None:
        """The step of this output has ended; ``idle`` if none follows at once."""
        if not any(step[0] is output.num_scheduled_tokens for step in self._under_way):
            # Scheduled under another policy, or empty: the next does not begin where one ended.
            self._ended_s = None
            return
        while True:
            tokens, since_s, load = self._under_way.popleft()
            if tokens is output.num_scheduled_tokens:
                break
        now_s = self._clock()
        took_s = now_s - (since_s if self._ended_s is None else self._ended_s)
        self._ended_s = None if idle else now_s
        if took_s > 0:
            self._model.observe(load, took_s)


def with_adapters(shown: Iterable[Any], running: Iterable[Any], max_loras: int) -> list[Any]:
    """``shown`` without those whose adapter would be one too many beside all that run.

    vLLM counts the adapters of the requests in a step; those of requests that sit out are needed
    in the next.
    """
    used = {_adapter(request) for request in running} - {0}
    fit = []
    for request in shown:
        adapter = _adapter(request)
        if adapter and adapter not in used:
            if len(used) >= max_loras:
                continue
            used.add(adapter)
        fit.append(request)
    return fit


def _adapter(request: Any) -> int:
    return request.lora_request.lora_int_id if request.lora_request else 0


def end_blocks(request: Any, lengths: Lengths, scheduler: Any) -> int:
    """KV blocks that a request is expected to take yet; hardly one is as long as it may be."""
    generated = request.num_output_tokens
    expected = lengths.to_generate(
        request.horizonserve_ticket.request_class, generated, request.max_tokens - generated
    )
    return blocks(scheduler, request.num_tokens + expected - request.num_computed_tokens)


def spare_blocks(running: Iterable[Any], lengths: Lengths, scheduler: Any) -> int:
    """KV blocks that are free when all who run have got to their expected ends."""
    left = free_blocks(scheduler)
    return left - sum(end_blocks(request, lengths, scheduler) for request in running)


def with_blocks(shown: Iterable[Any], spare: int, lengths: Lengths, scheduler: Any) -> list[Any]:
    """Those of ``shown`` that so many KV blocks last for to their expected ends.

    Who sits out holds its blocks for longer, so lending must not start what it cannot end: it
    would end in a preemption.
    """
    fit = []
    for request in shown:
        spare -= end_blocks(request, lengths, scheduler)
        if spare < 0:
            break
        fit.append(request)
    return fit


def blocks(scheduler: Any, tokens: int) -> int:
    """KV blocks that so many more tokens of a request may take."""
    groups = len(scheduler.kv_cache_config.kv_cache_groups)
    return int(groups * (tokens // scheduler.block_size + 1))


def free_blocks(scheduler: Any) -> int:
    """KV blocks that are free."""
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
