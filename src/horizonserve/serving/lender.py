"""Steps that some of the running requests sit out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from horizonserve.config import Settings
from horizonserve.policy.batch import StepModel
from horizonserve.policy.lending import Job, Lending, Limits, Plan
from horizonserve.policy.lengths import Lengths
from horizonserve.serving import compat, hooks
from horizonserve.serving.queue_view import QueueView
from horizonserve.serving.queues import is_fresh
from horizonserve.serving.step_log import StepLog, entry
from horizonserve.serving.steps import (
    StepClock,
    blocks,
    free_blocks,
    job_of,
    load_of,
    with_adapters,
    with_blocks,
)
from horizonserve.slo import RequestClass

_NOTHING = Plan([], [], [], 0, 0.0, 0)


class Lender(QueueView):
    """``QueueView`` that runs each step by the plan of policy/lending.py.

    - Who sits out has a lease of one step: vLLM's own loop passes over a running request until its
      ``next_decode_eligible_step``. It stays in ``running``, keeps slot and blocks, and can be
      aborted or preempted like any other.
    - ``running`` is put in the order of the plan, since vLLM gives its token budget away in that
      order: decodes, then prefills by due time, then those that sit out.
    - A waiting request enters when the plan gives it a token, KV blocks last for it and its
      adapter has a place beside those of all that run.
    - Where a stage cannot split a prompt, the token budget of a step is never lowered.
    - ``lending: off`` and every other policy are ``QueueView``'s.
    """

    _needs = compat.SCHEDULER + compat.LENDER
    _plan = _NOTHING
    _step_log: StepLog | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._model = StepModel()
        self._lengths = Lengths()
        super().__init__(*args, **kwargs)
        if self._admission is not None and self._settings.step_log:
            self._step_log = StepLog(self._settings.step_log)

    def _alone_s(self) -> float:
        return self._model.solo_s

    def _use(self, settings: Settings) -> None:
        super()._use(settings)
        self._plan = _NOTHING
        self._step_clock = StepClock(self._model, lambda: self._clock())
        self._lending = Lending(
            self._model,
            Limits(
                tokens=self.max_num_scheduled_tokens,
                requests=settings.batch,
                target_s=min(settings.slo_ms(name) for name in RequestClass) / 1e3,
                max_wait_s=settings.max_hide_s,
                splits=self._min_tokens == 1,
            ),
        )

    def _schedule_policy(self, throttle_prefills: bool, free: int) -> Any:
        if not self._settings.lends:
            return super()._schedule_policy(throttle_prefills, free)
        waits = free > 0 and bool(self.waiting or self.skipped_waiting)
        shown = self._candidates(free) if waits else []
        start_s = self._step_clock.start_s()
        self._model.co_run = hooks.shared is not None and hooks.shared.co_runs
        self._plan = plan = self._lending.plan(self._jobs(self.running), self._jobs(shown), start_s)
        if self._pressed(plan):
            self._plan = _NOTHING
            self.running.sort(key=lambda request: request.horizonserve_ticket.arrival_s)
            return super()._schedule_policy(throttle_prefills, free)
        self._lease(plan, start_s)
        # Companions enter with their parents; what is not fresh was never held back.
        place = {job.ticket: place for place, job in enumerate(plan.enter)}
        shown = [r for r in shown if r.horizonserve_ticket in place or not is_fresh(r)]
        shown.sort(key=lambda r: place[r.horizonserve_ticket] if is_fresh(r) else -1)
        budget = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens = min(max(plan.tokens, self._min_tokens), budget)
        try:
            if waits:
                output = self._schedule_view(throttle_prefills, shown)
            else:
                output = super()._schedule_policy(throttle_prefills, 0)
        finally:
            self.max_num_scheduled_tokens = budget
        self._advanced = len(output.num_scheduled_tokens)
        if self._advanced:
            self._step_clock.scheduled(
                output, load_of(output, self.requests, self._model.co_run), start_s
            )
            if self._step_log is not None:
                self._step_log.add(entry(plan, self._clock()))
        return output

    def _jobs(self, requests: Iterable[Any]) -> list[Job]:
        jobs = (job_of(request, self._lengths, self) for request in requests)
        return [job for job in jobs if job is not None]

    def _candidates(self, free: int) -> list[Any]:
        """Waiting requests that may enter beside all that run, those that sit out included."""
        shown = self._choose(free)
        if self.lora_config is not None:
            shown = with_adapters(shown, self.running, self.lora_config.max_loras)
        # Without leases the stock rule holds, which counts on answers that end early.
        if self._plan.lend:
            shown = with_blocks(shown, self.running, self._lengths, self)
        return shown

    def _pressed(self, plan: Plan) -> bool:
        """Whether KV blocks may not last for this step.

        Then vLLM preempts the last of ``running``, and progress is certain only if that is always
        the youngest; so such a step is left to vLLM, in order of arrival and without leases.
        """
        need = blocks(self, plan.tokens) + blocks(self, 0) * len(plan.run + plan.enter)
        return free_blocks(self) < need

    def _lease(self, plan: Plan, now_s: float) -> None:
        until = self.current_step + 2  # vLLM counts this step before it looks
        for job in plan.lend:
            job.request.next_decode_eligible_step = max(
                job.request.next_decode_eligible_step, until
            )
        for job in (*plan.run, *plan.enter):
            if not job.decode:  # a decode is served when its token comes
                job.ticket.served_s = now_s
        self._lent += len(plan.lend)
        rank = {job.request: place for place, job in enumerate(plan.run)}
        self.running.sort(key=lambda request: rank.get(request, len(rank)))

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        tokens, stopped = super()._update_request_with_output(
            request, new_token_ids, *args, **kwargs
        )
        if self._admission is not None:
            ticket = request.horizonserve_ticket
            ticket.token(self._clock(), len(tokens))
            if stopped:
                self._lengths.ended(ticket.request_class, request.num_output_tokens)
        return tokens, stopped

    def shutdown(self) -> None:
        """vLLM's, and the end of the log."""
        if self._step_log is not None:
            self._step_log.close()
        super().shutdown()

    def step_ended(self, output: Any) -> None:
        """Take the time of a step whose output has come."""
        if self._admission is not None:
            self._step_clock.ended(output, idle=not self.has_unfinished_requests())


class StepEnds(Scheduler):
    """Tells the lender when a step ends; first of all bases, since OmniAR's own does not ask on."""

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, after the time was taken."""
        result = super().update_from_output(scheduler_output, *args, **kwargs)
        self.step_ended(scheduler_output)
        return result
