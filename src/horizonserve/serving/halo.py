"""Iterations of a server whose services promise TTFT and TBT: HALO, and its baselines."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import compress
from math import inf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus

from horizonserve.config import BASELINES, Settings
from horizonserve.policy.baselines import Order, order_of, strictest_batch_tokens
from horizonserve.policy.batch import Load
from horizonserve.policy.edf import LostLast, earliest_deadline_first
from horizonserve.policy.halo import Decodes, Halo, HaloLimits, Iteration
from horizonserve.policy.lending import Job
from horizonserve.policy.slack import Ticket
from horizonserve.policy.streams import LONGEST_TBT_S
from horizonserve.serving import compat, hooks
from horizonserve.serving.lender import Ending, Lender, arrival_s
from horizonserve.serving.steps import end_blocks, job_of, load_of
from horizonserve.slo import Path

#: Between two looks at what all who run will need; what is free shrinks with what they need yet.
_LOOK_STEPS: Final = 8


class HaloLender(Lender):
    """``Lender`` with ``halo`` and its baselines; every other policy is ``Lender``'s.

    - HALO plans each iteration (policy/halo.py). Who sits out has ``Lender``'s lease of one step.
    - A request generates once its prompt is computed. One that was preempted is a prompt again
      until it has caught up.
    - Decodes are looked at all at once, as arrays (policy/streams.py), before a step and after it,
      and only what is no plain decode one by one: an iteration on a GPU takes 30 ms, and this comes
      on top of it.
    - A baseline orders the waiting requests; of QoServe it also cuts the batch. Nobody sits out.
    """

    _needs = Lender._needs + compat.HALO
    _halo: Halo | None = None
    _baseline: Order | None = None
    _baseline_name = ""
    _spare = 0
    _look_at_step = 0
    _lost_last: LostLast | None = None

    def _use(self, settings: Settings) -> None:
        super()._use(settings)
        name = settings.scheduler
        if name not in BASELINES:
            self._baseline = None
        elif name != self._baseline_name:
            # What it has counted stays as long as it is in use.
            self._baseline = order_of(name)
        self._baseline_name = name
        if self._halo is not None:
            for request in self.requests.values():
                self._stops(request)
        self._halo = self._lost_last = None
        if name == "halo":
            limits = HaloLimits(
                tbt_min_s=self._services.strictest_tbt_s,
                most_tokens=self.max_num_scheduled_tokens,
                batch_tokens=None if settings.fills_by_time else self.max_num_scheduled_tokens,
                max_bank_s=settings.max_bank_s or inf,
                lost_last=settings.lost == "demote",
            )
            self._lost_last = LostLast() if limits.lost_last else None
            self._halo = Halo(self._model, limits)
            for request in self.running:
                self._streams(request, self._halo)
            self._look_at_step = 0

    def add_request(self, request: Any) -> None:
        """vLLM's; a baseline counts it."""
        # Where its stream is noted (policy/streams.py): nowhere.
        request.horizonserve_row = 0
        new = request.request_id not in self.requests
        super().add_request(request)
        if self._baseline is not None and new:
            others = (r.horizonserve_ticket for r in self.waiting if r is not request)
            self._baseline.arrived(request.horizonserve_ticket, others)

    def _start(self, ticket: Ticket) -> None:
        super()._start(ticket)
        if self._halo is not None and self._lost_last is not None:
            self._lost_last.entered(ticket, self._first_token_s(self._halo))
        if self._baseline is not None:
            self._baseline.started(ticket)

    def _had(self, present: Sequence[Any]) -> list[tuple[Any, int]]:
        """``Lender``'s, of those without a row."""
        if self._halo is None:
            return super()._had(present)
        return [
            (request, request.num_output_tokens)
            for request in present
            if request is not None and not request.horizonserve_row
        ]

    def _note_tokens(self, made: Any, ending: Ending) -> None:
        if self._halo is not None and made.sampled_token_ids:
            tokens = _column(list(map(len, made.sampled_token_ids)))
            # Whoever has left has no row any more.
            rows = _column([r.horizonserve_row if r is not None else 0 for r in ending.present])
            came = tokens > 0
            self._halo.streams.generated(rows[came], tokens[came], self._clock())
        super()._note_tokens(made, ending)

    def _generated(self, request: Any, ticket: Ticket, tokens: int, now_s: float) -> None:
        super()._generated(request, ticket, tokens, now_s)
        if self._halo is not None:
            self._streams(request, self._halo)
        if self._baseline is not None:
            first = bool(request.num_output_tokens == tokens)
            self._baseline.generated(ticket, tokens, first, now_s)

    def _streams(self, request: Any, halo: Halo) -> None:
        """Give it a row, if it generates."""
        ticket = request.horizonserve_ticket
        # One that was preempted may still get a token of a step before; it is a prompt again.
        runs = request.status is RequestStatus.RUNNING and not request.is_prefill_chunk
        if runs and ticket.released_s is not None:
            request.horizonserve_row = halo.streams.enter(
                ticket.released_s, ticket.tbt_s, request.num_computed_tokens
            )

    def _stops(self, request: Any) -> None:
        """It generates nothing until its next token."""
        if self._halo is not None and (row := request.horizonserve_row):
            request.horizonserve_row, ticket = 0, request.horizonserve_ticket
            ticket.released_s, ticket.served_s = self._halo.streams.leave(row), self._clock()

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._stops(request)

    def request_ended(self, request: Any) -> None:
        """``Lender``'s."""
        self._stops(request)
        super().request_ended(request)

    def session_goes_on(self, session: Any) -> None:
        """``Lender``'s; its next answer begins."""
        self._stops(session)
        super().session_goes_on(session)

    def _first_token_s(self, halo: Halo) -> float:
        """When one that enters now has its first token, at the earliest."""
        return self._clock() + halo.limits.tbt_min_s

    def _order(self, limit: int) -> list[Ticket]:
        if self._halo is not None:
            groups = self._fresh.groups
            if self._lost_last is None:
                return earliest_deadline_first(groups, limit)
            return self._lost_last.order(groups, limit, self._first_token_s(self._halo))
        if self._baseline is not None:
            return self._baseline.order(self._fresh.tickets, self._clock())[:limit]
        return super()._order(limit)

    def _schedule_policy(self, throttle_prefills: bool, free: int) -> Any:
        if self._halo is not None:
            return self._halo_step(self._halo, throttle_prefills, free)
        if self._baseline is not None:
            return self._baseline_step(throttle_prefills, free)
        return super()._schedule_policy(throttle_prefills, free)

    def _baseline_step(self, throttle_prefills: bool, free: int) -> Any:
        start_s = self._step_clock.start_s()
        tokens = self.max_num_scheduled_tokens
        if self._settings.scheduler.startswith("qoserve"):
            static = self._settings.scheduler == "qoserve-static"
            tokens = strictest_batch_tokens(self._model, self._jobs(self.running), tokens, static)
        with self._at_most(tokens):
            output = super()._schedule_policy(throttle_prefills, free)
        if output.num_scheduled_tokens:
            load = load_of(output, self.requests, self._model.co_run)
            self._step_clock.scheduled(output, load, start_s)
        return output

    def _halo_step(self, halo: Halo, throttle_prefills: bool, free: int) -> Any:
        start_s = self._step_clock.start_s()
        self._model.co_run = hooks.shared is not None and hooks.shared.co_runs
        shown: list[Any] = []

        def waiting(most: int) -> list[Job]:
            shown.extend(self._candidates(min(free, most)))
            return self._jobs(shown)

        generating, decodes, prefills = self._split(halo)
        some_wait = free > 0 and (self.waiting or self.skipped_waiting)
        plan = halo.plan(decodes, prefills, waiting if some_wait else None, start_s)
        self._spare -= sum(end_blocks(job.request, self._lengths, self) for job in plan.enter)
        requests = plan.computing + len(plan.prefills) + len(plan.enter)
        planned = self._moves_on and self._blocks_last(plan.tokens, requests)
        if planned:
            lend = [generating[index] for index in plan.order[plan.computing :].tolist()]
            self._sit_out(lend)
            self._lends_now = bool(lend)
            self._prefills_last(plan.prefills)
            tokens = plan.tokens + plan.computing * self.num_spec_tokens
            output = self._enter(throttle_prefills, plan.enter, tokens, shown)
        else:
            self.running.sort(key=arrival_s)
            output = self._step(throttle_prefills, shown)
        self._advanced = len(output.num_scheduled_tokens)
        self._moves_on = self._advanced > 0 or not requests
        if self._advanced:
            exact = not planned or self.num_spec_tokens
            load = (
                load_of(output, self.requests, self._model.co_run)
                if exact
                else self._load(plan, output)
            )
            self._step_clock.scheduled(output, load, start_s)
        return output

    def _load(self, plan: Iteration, output: Any) -> Load:
        """What a step by the plan computes: its decodes as planned, its prompts as scheduled."""
        attention = plan.context_tokens
        for job in (*plan.prefills, *plan.enter):
            tokens = output.num_scheduled_tokens.get(job.request.request_id, 0)
            attention += tokens * (job.context_tokens + tokens / 2)
        prefill_tokens = max(0, output.total_num_scheduled_tokens - plan.computing)
        return Load(plan.computing, prefill_tokens, attention, self._model.co_run)

    def _prefills_last(self, prefills: Sequence[Job]) -> None:
        """vLLM gives its token budget away in the order of ``running``."""
        if prefills:
            behind = [job.request for job in prefills]
            chosen = set(behind)
            self.running[:] = [r for r in self.running if r not in chosen] + behind

    def _split(self, halo: Halo) -> tuple[list[Any], Decodes, list[Job]]:
        """Running requests that generate, what is known of them, and those that do not yet."""
        running, streams = self.running, halo.streams
        rows = _column([request.horizonserve_row for request in running])
        released_s, tbt_s = streams.released_s[rows], streams.tbt_s[rows]
        context_tokens = streams.context_tokens[rows]
        generates = ~np.isnan(released_s)
        others = np.flatnonzero(~generates)
        if self.use_pp:
            until = _column([request.next_decode_eligible_step for request in running])
            generates &= until <= self.current_step + 1
        prefills = []
        for index in others.tolist():
            job = job_of(running[index], self._lengths, self)
            if job is None:
                continue
            if not job.decode:
                prefills.append(job)
                continue
            # Its next token is its first, under way, or it is for a later stage without a TBT.
            generates[index] = True
            context_tokens[index] = job.context_tokens
            ticket = job.ticket
            if ticket.path is Path.LONG:
                released_s[index], tbt_s[index] = -np.inf, halo.limits.tbt_min_s
            else:
                tbt_s[index] = min(ticket.tbt_s, LONGEST_TBT_S)
                released_s[index] = ticket.due_s() - tbt_s[index]
        if isinstance(self, AsyncScheduler):
            in_flight = _column([request.num_output_placeholders for request in running])
            # Every step under way holds a token and its drafts.
            released_s += np.ceil(in_flight / (1 + self.num_spec_tokens)) * tbt_s
        decodes = Decodes(released_s, tbt_s, context_tokens)
        if generates.all():
            return list(running), decodes, prefills
        generating = list(compress(running, generates.tolist()))
        return generating, Decodes(*(column[generates] for column in decodes)), prefills

    def _spare_blocks(self) -> int:
        if self._halo is None:
            return super()._spare_blocks()
        if self.current_step >= self._look_at_step:
            self._look_at_step = self.current_step + _LOOK_STEPS
            self._spare = super()._spare_blocks()
        return self._spare


def _column(values: list[int]) -> NDArray[np.int64]:
    """As an array, in half of the time that numpy takes to look at each of a list."""
    return np.asarray(array("q", values))
