"""Steps of a vLLM scheduler: how long they took, and who takes part in the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from horizonserve.policy.batch import Load, StepModel
from horizonserve.policy.lending import Job


def job_of(request: Any) -> Job | None:
    """A running or waiting request as a step sees it; None when a step can do nothing for it."""
    in_flight = request.num_output_placeholders
    tokens = request.num_tokens_with_spec + in_flight - request.num_computed_tokens
    to_generate = request.max_tokens - request.num_output_tokens - in_flight
    if tokens <= 0 or to_generate <= 0:
        return None
    generated = request.num_output_tokens + in_flight
    return Job(
        request,
        request.horizonserve_ticket,
        tokens,
        request.num_computed_tokens,
        generated,
        to_generate,
        in_flight,
        decode=generated > 0 and tokens <= 1 + len(request.spec_token_ids),
    )


def load_of(output: Any, requests: dict[str, Any]) -> Load:
    """What a scheduled step computes."""
    decodes = prefill_tokens = 0
    attention = 0.0
    for name, tokens in output.num_scheduled_tokens.items():
        context = requests[name].num_computed_tokens - tokens
        attention += tokens * (context + tokens / 2)
        if tokens == 1:
            decodes += 1
        else:
            prefill_tokens += tokens
    return Load(decodes, prefill_tokens, attention)


class StepClock:
    """Measures steps and teaches the model.

    A step takes from the end of the one before to its own end, the loop around it included; the
    first after an idle time takes from when it was scheduled. Asynchronous scheduling has two
    steps under way.
    """

    def __init__(self, model: StepModel, clock: Callable[[], float]) -> None:
        self.model = model
        self._clock = clock
        self._under_way: deque[tuple[float, Load]] = deque()
        self._ended_s: float | None = None
        self._busy_until_s = 0.0

    def start_s(self) -> float:
        """When a step that is scheduled now would start."""
        now_s = self._clock()
        return max(now_s, self._busy_until_s) if self._under_way else now_s

    def scheduled(self, load: Load, since_s: float) -> None:
        """A step with this load is on its way, scheduled at ``since_s``."""
        start_s = max(since_s, self._busy_until_s) if self._under_way else since_s
        self._busy_until_s = start_s + self.model.step_s(load)
        self._under_way.append((since_s, load))

    def ended(self) -> None:
        """The oldest step under way has ended."""
        if not self._under_way:
            return
        now_s = self._clock()
        since_s, load = self._under_way.popleft()
        if self._ended_s is not None:
            since_s = self._ended_s
        self._ended_s = now_s
        if now_s > since_s:
            self.model.observe(load, now_s - since_s)

    def idle(self) -> None:
        """Nothing follows at once; the next step counts from when it is scheduled."""
        self._ended_s = None


def fitting(shown: Iterable[Any], running: Iterable[Any], max_loras: int) -> list[Any]:
    """``shown`` without those whose adapter would be one too many beside all that run.

    vLLM counts the adapters of the requests that take part in a step; those of requests that sit
    out are needed in the next one.
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
