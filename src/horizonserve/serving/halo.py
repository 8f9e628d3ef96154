"""Iterations of a server whose services promise TTFT and TBT: HALO, and its baselines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from math import inf
from operator import attrgetter
from typing import Any, Final

import numpy as np

from horizonserve.config import BASELINES, Settings
from horizonserve.policy.baselines import Order, order_of, strictest_batch_tokens
from horizonserve.policy.batch import Load
from horizonserve.policy.edf import LostLast, earliest_deadline_first
from horizonserve.policy.halo import Decodes, Halo, HaloLimits, Iteration
from horizonserve.policy.lending import Job
from horizonserve.policy.slack import Ticket
from horizonserve.serving import compat, hooks
from horizonserve.serving.lender import Lender, arrival_s
from horizonserve.serving.steps import end_blocks, job_of, load_of
from horizonserve.slo import Path

#: Between two looks at what all who run will need; what is free shrinks with what they need yet.
_LOOK_STEPS: Final = 8
#: A longer TBT is none.
_LONGEST_TBT_S: Final = 1e6

_TICKET = attrgetter("horizonserve_ticket")
_RELEASED = attrgetter("released_s")
_TBT = attrgetter("tbt_s")
_IN_FLIGHT = attrgetter("num_output_placeholders")
_COMPUTED = attrgetter("num_computed_tokens")
_ELIGIBLE = attrgetter("next_decode_eligible_step")
_PREFILLS = attrgetter("is_prefill_chunk")


class HaloLender(Lender):
    """``Lender`` with ``halo`` and its baselines; every other policy is ``Lender``'s.

    - HALO plans each iteration (policy/halo.py). Who sits out has ``Lender``'s lease of one step.
    - A request generates once its prompt is computed. One that was preempted is a prompt again
      until it has caught up.
    - Decodes are looked at all at once, as arrays, and only what is neither a plain decode nor
      eligible one by one: an iteration on a GPU takes 30 ms, and this comes on top of it.
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
        self._on_tokens = self._baseline.generated if self._baseline else None
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
            self._look_at_step = 0

    def add_request(self, request: Any) -> None:
        """vLLM's; a baseline counts it."""
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
            if free > 0 and (self.waiting or self.skipped_waiting):
                shown.extend(self._candidates(min(free, most)))
            return self._jobs(shown)

        generating, decodes, prefills = self._split(halo.limits.tbt_min_s)
        plan = halo.plan(decodes, prefills, waiting, start_s)
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

    def _split(self, tbt_min_s: float) -> tuple[list[Any], Decodes, list[Job]]:
        """Running requests that generate, what is known of them, and those that do not yet."""
        running, count = self.running, len(self.running)
        tickets = list(map(_TICKET, running))
        released_s = np.array(list(map(_RELEASED, tickets)), np.float64)  # None: nan
        tbt_s = np.minimum(np.fromiter(map(_TBT, tickets), np.float64, count), _LONGEST_TBT_S)
        generates = ~np.isnan(released_s)
        # What is rare is asked first of all together: most steps end here.
        eligible = np.ones(count, bool)
        if self.use_pp and max(map(_ELIGIBLE, running), default=0) > self.current_step + 1:
            eligible = (
                np.fromiter(map(_ELIGIBLE, running), np.int64, count) <= self.current_step + 1
            )
            generates &= eligible
        if any(map(_PREFILLS, running)):
            generates &= ~np.fromiter(map(_PREFILLS, running), bool, count)
        prefills = []
        for index in np.flatnonzero(eligible & ~generates).tolist():
            job = job_of(running[index], self._lengths, self)
            if job is None:
                continue
            if not job.decode:
                prefills.append(job)
                continue
            # Its first token is under way, or it is for a later stage and has no promised TBT.
            generates[index] = True
            if job.ticket.path is Path.LONG:
                released_s[index], tbt_s[index] = -np.inf, tbt_min_s
            else:
                released_s[index] = job.ticket.deadline_s - tbt_s[index]
        if any(map(_IN_FLIGHT, running)):
            in_flight = np.fromiter(map(_IN_FLIGHT, running), np.float64, count)
            # Every step under way holds a token and its drafts.
            released_s += np.ceil(in_flight / (1 + self.num_spec_tokens)) * tbt_s
        contexts = np.fromiter(map(_COMPUTED, running), np.float64, count)
        if generates.all():
            return list(running), Decodes(released_s, tbt_s, contexts), prefills
        generating = list(compress(running, generates.tolist()))
        decodes = Decodes(released_s[generates], tbt_s[generates], contexts[generates])
        return generating, decodes, prefills

    def _spare_blocks(self) -> int:
        if self._halo is None:
            return super()._spare_blocks()
        if self.current_step >= self._look_at_step:
            self._look_at_step = self.current_step + _LOOK_STEPS
            self._spare = super()._spare_blocks()
        return self._spare
