"""Who advances in a step of the shared stage, and who lends its place.

Every decode has a *pace*: the time per token that it can afford from now on. For a stream it is
the promised TBT and what is in the bank, spread over the tokens to come; for a long request the
time left for this stage, likewise. A request whose promise is broken has none to keep and is paced
so that it ends within ``LATE_S``.

- *Length.* The step is as long as the strictest pace allows, so the batch is as large as every
  promise permits and needs no number. If no step of that length can keep all promises, the length
  and the promises are chosen that keep most (promises.py); the others are given up for this step.
- *Order.* (1) decodes that their pace allows no further pause; (2) prefills, earliest due first,
  those that run and those that wait alike; (3) other decodes; (4) prefills that are lost. Prompts
  are cut to what is left of the step.
- *Lease.* Who does not fit sits out this step. It keeps its slot and its KV blocks; nothing is
  preempted, recomputed or moved.
- A step that would be empty serves the first of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import Any, Final, NamedTuple

from horizonserve.policy.batch import StepModel
from horizonserve.policy.promises import Promise, most_kept
from horizonserve.policy.slack import Ticket
from horizonserve.slo import Path

#: A request that arrives waits for the step under way; it lasts this share of the strictest
#: first-response target at most.
STEP_SHARE: Final = 0.1
#: Prefills are planned into this share of the time they have, long requests into this one: what
#: comes after them can take longer than it does alone.
PREFILL_SHARE: Final = 0.85
LONG_SHARE: Final = 0.7
#: A request whose promise is broken is to end within so many seconds.
LATEST = 0.95
LATE_S: Final = 20.0
#: A prefill that has begun and is lost is to end within so many seconds.
LOST_PREFILL_S: Final = 5.0
#: Step lengths that are tried grow by this factor.
STRIDE: Final = 1.15
_TYPICAL: Final = 0.05
#: Context of the decode alone on the server.
_SOLO_CONTEXT: Final = 256


@dataclass(slots=True, eq=False)
class Job:
    """A request of the shared stage as a step sees it."""

    request: Any
    ticket: Ticket
    #: Tokens to compute before the next one is generated; 1 for a decode.
    tokens: int
    context_tokens: int
    generated: int
    #: Tokens it is expected to generate yet.
    to_generate: int
    #: Tokens that steps under way will generate.
    in_flight: int = 0
    decode: bool = False
    #: What it adds to a step: a decode its token, a prefill the whole rest of its prompt.
    cost_s: float = 0.0
    #: Of a decode: time per token that it can afford from now on.
    pace_s: float = inf
    #: Of a decode: when its next token is due at its pace. Of a prefill: when it must be done.
    due_s: float = inf
    wanted_s: float = inf


class Plan(NamedTuple):
    """What a step is to do."""

    #: Requests that run already and advance, decodes before prefills.
    run: list[Job]
    #: Requests that run already and sit out.
    lend: list[Job]
    #: Waiting requests that enter, in order.
    enter: list[Job]
    tokens: int
    #: How long the step may take, and how many promises it gives up.
    limit_s: float
    given_up: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may hold at most."""

    tokens: int
    #: Requests that advance; None: as many as the promises permit.
    requests: int | None = None
    #: Strictest first-response target.
    target_s: float = 1.0
    #: Whether a prompt may be cut.
    splits: bool = True


class Lending:
    """Plans the steps of the shared stage; times in seconds on the clock of the tickets."""

    def __init__(self, model: StepModel, limits: Limits) -> None:
        self.model = model
        self.limits = limits
        self._typical_s = 0.0

    @property
    def solo_s(self) -> float:
        """Predicted step of one decode alone: its TPOT."""
        return self.model.fixed_s + self.model.decode_s(_SOLO_CONTEXT)

    def plan(self, running: Sequence[Job], waiting: Sequence[Job], now_s: float) -> Plan:
        """The plan of a step that starts now.

        ``waiting``: those that slots and KV blocks last for, in the order of the view.
        """
        self._typical_s = max(self._typical_s, self.solo_s)
        decodes = [job for job in running if job.decode]
        prefills = [*(job for job in running if not job.decode), *waiting]
        kept = [job for job in decodes if self._affords(job, now_s)]
        late = [job for job in decodes if job.pace_s == inf]
        tbt_s = min((job.ticket.tbt_s for job in decodes), default=inf)
        for job in late:
            job.pace_s = _late_pace(job, tbt_s)
        on_time = sorted((j for j in prefills if self._winnable(j, now_s)), key=attrgetter("due_s"))
        lost = [job for job in prefills if job.due_s == inf]

        limit_s, given_up = self._length(kept, late, on_time, now_s)
        for job in given_up & set(kept):
            job.wanted_s = inf
            job.pace_s = max(job.pace_s, _late_pace(job, tbt_s))
        for job in decodes:
            job.due_s = (now_s if job.in_flight else job.ticket.served_s) + min(job.pace_s, job.wanted_s)
        kept = sorted((job for job in kept if job not in given_up), key=attrgetter("due_s"))
        late = sorted((job for job in decodes if job not in kept), key=attrgetter("due_s"))
        now_or_late = [j for j in (*kept, *late) if j.due_s < now_s + 2 * limit_s]
        order = [
            *now_or_late,
            *(job for job in on_time if job not in given_up),
            *(job for job in on_time if job in given_up),
            *(job for job in (*kept, *late) if job.due_s >= now_s + 2 * limit_s),
            *lost,
        ]
        return self._fill(order, running, limit_s, len(given_up))

    def _affords(self, job: Job, now_s: float) -> bool:
        """Set cost and pace of a decode; False if its promise is, or is about to be, broken."""
        ticket = job.ticket
        job.cost_s = self.model.decode_s(job.context_tokens)
        if ticket.broken:
            return False
        if ticket.path is Path.SHORT:
            end_s = ticket.due_s(job.in_flight) + (job.to_generate - 1) * ticket.tbt_s
            pace_s = (end_s - now_s) / job.to_generate
            if pace_s < self.solo_s:
                return False
        else:
            end_s = self._leave_by_s(job, LATEST)
            if now_s + job.to_generate * self.solo_s > self._leave_by_s(job, 1.0):
                return False
            pace_s = max((end_s - now_s) / job.to_generate, self.solo_s)
            job.wanted_s = max(
                (self._leave_by_s(job, LONG_SHARE) - now_s) / job.to_generate, self.solo_s
            )
        job.pace_s = pace_s
        return True

    def _winnable(self, job: Job, now_s: float) -> bool:
        """Set cost and due time of a prefill; False if it is lost."""
        ticket = job.ticket
        job.cost_s = self.model.prefill_s(job.tokens, job.context_tokens)
        soonest_s = now_s + self.model.fixed_s + job.cost_s
        if ticket.path is Path.SHORT:
            job.due_s = ticket.deadline_s
            winnable = soonest_s <= ticket.deadline_s
        else:
            decode_s = job.to_generate * self.solo_s
            winnable = soonest_s + decode_s <= self._leave_by_s(job, 1.0)
            due_s = self._leave_by_s(job, LONG_SHARE) - job.to_generate * self._typical_s
            job.due_s = max(due_s, soonest_s + job.cost_s)
        if not winnable:
            begun = job.context_tokens > 0 or ticket.started
            job.due_s = now_s + LOST_PREFILL_S if begun else inf
        return job.due_s < inf

    def _leave_by_s(self, job: Job, share: float) -> float:
        """When a long request must leave the stage to be answered in that share of its time."""
        ticket = job.ticket
        here_s = (job.generated + job.to_generate) * self.solo_s
        after_s = max(ticket.estimate_s / 4, ticket.estimate_s - here_s)
        return ticket.arrival_s + share * (ticket.deadline_s - ticket.arrival_s) - after_s

    def _length(
        self, kept: list[Job], late: list[Job], prefills: list[Job], now_s: float
    ) -> tuple[float, set[Job]]:
        """How long the step may take, and whose promises it gives up."""
        longest_s = max(STEP_SHARE * self.limits.target_s, self.solo_s)
        jobs = [*kept, *prefills]
        promises = sorted(
            Promise(
                now_s + job.pace_s * job.to_generate
                if job.decode
                else now_s + PREFILL_SHARE * (job.due_s - now_s),
                job.cost_s * job.to_generate if job.decode else job.cost_s,
                index,
            )
            for index, job in enumerate(jobs)
        )
        late_share = sum(job.cost_s / job.pace_s for job in late)

        def keeps(limit_s: float) -> list[Promise]:
            able = (p for p in promises if jobs[p.index].pace_s >= limit_s)
            return most_kept(able, now_s, 1 - self.model.fixed_s / limit_s - late_share)

        strictest_s = min((job.pace_s for job in kept), default=inf)
        limit_s = max(min(strictest_s, longest_s), self.solo_s)
        best = keeps(limit_s)
        if len(best) < len(jobs):
            longer_s = limit_s * STRIDE
            while longer_s <= longest_s:
                # A longer step does more in the same time, so it wins a tie.
                if len(found := keeps(longer_s)) >= len(best):
                    best, limit_s = found, longer_s
                longer_s *= STRIDE
        self._typical_s += _TYPICAL * (limit_s - self._typical_s)
        return limit_s, set(jobs) - {jobs[promise.index] for promise in best}

    def _fill(
        self, order: Iterable[Job], running: Sequence[Job], limit_s: float, given_up: int
    ) -> Plan:
        """Take jobs in this order while the step lasts."""
        left_s = limit_s - self.model.fixed_s
        left_tokens = self.limits.tokens
        left_requests = self.limits.requests or left_tokens
        taken: dict[Job, int] = {}
        for job in order:
            tokens = self._fit(job, left_s, left_tokens) if left_requests else 0
            if not tokens and not taken:
                tokens = min(job.tokens, left_tokens)
            if tokens:
                taken[job] = tokens
                left_tokens -= tokens
                left_requests -= 1
                left_s -= self._cost_s(job, tokens)
        inside = set(running)
        run = sorted((job for job in taken if job in inside), key=lambda job: not job.decode)
        return Plan(
            run=run,
            lend=[job for job in running if job not in taken],
            enter=[job for job in taken if job not in inside],
            tokens=max(1, sum(taken.values())),
            limit_s=limit_s,
            given_up=given_up,
        )

    def _fit(self, job: Job, left_s: float, left_tokens: int) -> int:
        """How many of its tokens fit."""
        if left_s <= 0:
            return 0
        if job.cost_s <= left_s and job.tokens <= left_tokens:
            return job.tokens
        if job.decode or not self.limits.splits:
            return 0
        return min(left_tokens, int(job.tokens * min(1.0, left_s / job.cost_s)))

    def _cost_s(self, job: Job, tokens: int) -> float:
        if tokens == job.tokens:
            return job.cost_s
        return self.model.prefill_s(tokens, job.context_tokens)


def _late_pace(job: Job, tbt_s: float) -> float:
    """Pace of a decode whose promise is broken: no faster than the strictest promise."""
    return max(min(tbt_s, LATE_S), LATE_S / job.to_generate)
