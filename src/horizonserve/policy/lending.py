"""Who advances in a step of the shared stage, and who lends its place.

Every decode has a *pace*: the time per token that it can afford from now on. For a stream it is
the promised TBT and what is in the bank, spread over the tokens to come; for a long request the
time that is left for this stage, spread likewise.

- *Length.* The step is as long as the strictest pace allows, so the batch is as large as all
  promises permit and nobody has to give its size. Where no step of that length could keep every
  promise, length and promises are chosen such that most are kept (promises.py), and the others are
  given up in this step. They may be taken up again in the next.
- *Order.* Decodes that can afford no pause; prefills, earliest due first, those that run and those
  that wait alike; decodes whose promise is given up, least to generate first, within
  ``LATE_SHARE`` of the step; all other decodes; prefills that are lost, but for the share of them
  that view.py grants. A prompt is cut to what is left of the step.
- *Lease.* A decode for which the step has no place sits out this step. It keeps its slot and its KV
  blocks: nothing is preempted, recomputed or moved. Nobody sits out longer than ``max_wait_s``.
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

#: A request that arrives waits for the step under way, so a step takes no more than this share of
#: the strictest first-response target; but so many times the shortest step in any case, of which
#: the most would otherwise go into what every step costs.
STEP_SHARE: Final = 0.1
LONGEST_SOLOS: Final = 4.0
#: Prefills are planned into this share of the time they have.
PREFILL_SHARE: Final = 0.85
#: Long requests are served as if they had this share of their time: what comes after this stage
#: takes longer than it does alone.
LONG_SHARE: Final = 0.6
#: Time is kept for decodes whose promise is broken, as if an answer were to take so many seconds,
#: but this share of it at most. Lost prefills that have begun count as due in so many seconds.
LATE_S: Final = 10.0
LATE_SHARE: Final = 0.7
LOST_PREFILL_S: Final = 5.0
#: A step is planned to end this share of its length before it must.
MARGIN: Final = 0.05
#: So many longer steps are tried.
TRIES: Final = 5


@dataclass(slots=True, eq=False)
class Job:
    """A request of the shared stage as a step sees it."""

    request: Any
    ticket: Ticket
    #: Tokens to compute before the next one is generated; 1 for a decode.
    tokens: int
    context_tokens: int
    generated: int
    #: Tokens it is expected to generate yet, at least 1.
    to_generate: int
    #: Steps under way that it takes part in.
    in_flight: int = 0
    decode: bool = False
    #: Whether it is in the stage already, not waiting.
    runs: bool = True
    #: What it adds to a step: a decode its token, a prefill the rest of its prompt.
    cost_s: float = 0.0
    #: Of a decode: time per token that keeps its promise; infinite if that is broken.
    pace_s: float = inf
    #: When a decode should advance again, at the latest; when a prefill must be done.
    due_s: float = inf


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
    max_wait_s: float = 5.0
    #: Whether a prompt may be cut.
    splits: bool = True


class Lending:
    """Plans the steps of the shared stage; times in seconds on the clock of the tickets."""

    def __init__(self, model: StepModel, limits: Limits) -> None:
        self.model = model
        self.limits = limits
        #: Smoothed length of the steps, for what lies several steps ahead.
        self._typical_s = 0.0

    def plan(self, running: Sequence[Job], waiting: Sequence[Job], now_s: float) -> Plan:
        """The plan of a step that starts now.

        ``waiting``: those that slots and KV blocks last for, in the order of the view.
        """
        self._typical_s = max(self._typical_s, self.model.solo_s)
        decodes = [job for job in running if job.decode]
        prefills = [*(job for job in running if not job.decode), *waiting]
        for job in decodes:
            self._pace(job, now_s)
        for job in prefills:
            self._due(job, now_s)
        due = sorted((job for job in prefills if job.due_s < inf), key=attrgetter("due_s"))
        lost = [job for job in prefills if job.due_s == inf]

        limit_s, given_up = self._length(decodes, due, now_s)
        self._typical_s += 0.05 * (limit_s - self._typical_s)
        # The view puts a lost request first when the share of the lost is due (view.py).
        first_is_lost = bool(waiting) and waiting[0].due_s == inf
        share = waiting[:1] if first_is_lost and any(j.due_s < inf for j in waiting) else []
        order = self._order(decodes, due, share, given_up, limit_s, now_s)
        order += [job for job in lost if job not in share]
        return self._fill(order, running, limit_s, len(given_up))

    def _pace(self, job: Job, now_s: float) -> None:
        """Set cost and pace of a decode."""
        ticket, solo_s = job.ticket, self.model.solo_s
        job.cost_s = self.model.decode_s(job.context_tokens)
        if ticket.broken:
            return
        if ticket.path is Path.SHORT:
            end_s = ticket.due_s(job.in_flight) + (job.to_generate - 1) * ticket.tbt_s
        else:
            end_s = self._leave_by_s(job, 1.0)
        pace_s = (end_s - now_s) / job.to_generate
        if pace_s > solo_s:
            job.pace_s = pace_s

    def _due(self, job: Job, now_s: float) -> None:
        """Set cost and due time of a prefill."""
        ticket = job.ticket
        job.cost_s = self.model.prefill_s(job.tokens, job.context_tokens)
        first_s = now_s + self.model.fixed_s + job.cost_s
        if ticket.path is Path.SHORT:
            due_s = latest_s = ticket.due_s(job.in_flight)
        else:
            latest_s = self._leave_by_s(job, 1.0) - job.to_generate * self.model.solo_s
            wanted_s = self._leave_by_s(job, LONG_SHARE) - job.to_generate * self._typical_s
            due_s = max(wanted_s, first_s + job.cost_s)
        if first_s <= latest_s:
            job.due_s = due_s
        elif job.runs or job.generated:
            job.due_s = now_s + LOST_PREFILL_S

    def _leave_by_s(self, job: Job, share: float) -> float:
        """When a long request must leave the stage to be answered in that share of its time."""
        ticket = job.ticket
        here_s = (job.generated + job.to_generate) * self.model.solo_s
        after_s = max(ticket.estimate_s / 4, ticket.estimate_s - here_s)
        return ticket.arrival_s + share * (ticket.deadline_s - ticket.arrival_s) - after_s

    def _length(
        self, decodes: Sequence[Job], prefills: Sequence[Job], now_s: float
    ) -> tuple[float, set[Job]]:
        """How long the step may take, and whose promises it gives up."""
        kept = [job for job in decodes if job.pace_s < inf]
        late_share = sum(j.cost_s / self._late_pace_s(j) for j in decodes if j.pace_s == inf)
        jobs = [*kept, *prefills]
        promises = [
            Promise(now_s + job.pace_s * job.to_generate, job.cost_s * job.to_generate, index)
            if job.decode
            else Promise(now_s + PREFILL_SHARE * (job.due_s - now_s), job.cost_s, index)
            for index, job in enumerate(jobs)
        ]
        promises.sort()

        def keeps(limit_s: float) -> list[Promise]:
            able = (p for p in promises if (1 - MARGIN) * jobs[p.owner].pace_s >= limit_s)
            speed = 1 - self.model.fixed_s / limit_s
            return most_kept(able, now_s, speed - min(late_share, LATE_SHARE * speed))

        longest_s = max(STEP_SHARE * self.limits.target_s, LONGEST_SOLOS * self.model.solo_s)
        strictest_s = min((job.pace_s for job in kept), default=inf)
        limit_s = min((1 - MARGIN) * strictest_s, longest_s)
        best = keeps(limit_s) if promises else []
        if len(best) < len(promises):
            stride = (longest_s / limit_s) ** (1 / TRIES)
            for longer_s in [limit_s * stride**power for power in range(1, TRIES + 1)]:
                # A longer step does more in the same time, so it wins a tie.
                if len(found := keeps(longer_s)) >= len(best):
                    best, limit_s = found, longer_s
        return limit_s, set(jobs) - {jobs[promise.owner] for promise in best}

    def _order(
        self,
        decodes: Sequence[Job],
        prefills: Sequence[Job],
        share: Sequence[Job],
        given_up: set[Job],
        limit_s: float,
        now_s: float,
    ) -> list[Job]:
        """Whom to serve, in this order; sets when each decode is due to advance."""
        kept: list[Job] = []
        late: list[Job] = []
        long_ago_s = now_s - self.limits.max_wait_s
        waited = [job for job in prefills if job.runs and _served_s(job) < long_ago_s]
        first = set(waited)
        prefills = [job for job in prefills if job not in first]
        for job in decodes:
            pace_s = job.pace_s
            if pace_s < inf and job.ticket.path is Path.LONG:
                left_s = self._leave_by_s(job, LONG_SHARE) - now_s
                pace_s = max(min(pace_s, left_s / job.to_generate), self.model.solo_s)
            served_s = now_s if job.in_flight else _served_s(job)
            job.due_s = served_s + pace_s
            if served_s < long_ago_s:
                waited.append(job)
            else:
                (late if pace_s == inf or job in given_up else kept).append(job)
        # One that is not in this step ends the next one at the earliest.
        soon_s = now_s + 2 * limit_s
        by_due = attrgetter("due_s")
        now, later = _split(sorted(kept, key=by_due), soon_s)
        # Who needs least to its end makes room soonest.
        late.sort(key=attrgetter("to_generate"))
        places = self._late_places(late, limit_s) if kept or prefills else len(late)
        return [
            *sorted(waited, key=by_due),
            *now,
            *share,
            *(job for job in prefills if job not in given_up),
            *late[:places],
            *(job for job in prefills if job in given_up),
            *later,
            *late[places:],
        ]

    def _late_places(self, late: Sequence[Job], limit_s: float) -> int:
        """How many of those whose promise is not kept have a place before others."""
        left_s = LATE_SHARE * (limit_s - self.model.fixed_s)
        for places, job in enumerate(late):
            left_s -= job.cost_s
            if left_s < 0:
                return max(1, places)
        return len(late)

    def _late_pace_s(self, job: Job) -> float:
        """Pace of a decode whose promise is not kept: never ahead of its TBT."""
        pace_s = LATE_S / (job.generated + job.to_generate)
        return max(pace_s, job.ticket.tbt_s) if job.ticket.tbt_s < inf else pace_s

    def _fill(
        self, order: Iterable[Job], running: Sequence[Job], limit_s: float, given_up: int
    ) -> Plan:
        """Take jobs in this order while the step lasts, and the first in any case."""
        left_s = limit_s - self.model.fixed_s
        left_tokens = self.limits.tokens
        left_requests = self.limits.requests or left_tokens
        taken: dict[Job, int] = {}
        enters = False
        for job in order:
            tokens = self._fit(job, left_s, left_tokens) if left_requests else 0
            if job.runs and enters and tokens < job.tokens:
                # vLLM serves those that run first, and would give it the others' tokens.
                tokens = 0
            if not taken:
                tokens = max(tokens, 1 if self.limits.splits else min(job.tokens, left_tokens))
            if tokens:
                taken[job] = tokens
                enters |= not job.runs
                left_tokens -= tokens
                left_requests -= 1
                left_s -= (
                    job.cost_s
                    if tokens == job.tokens
                    else self.model.prefill_s(tokens, job.context_tokens)
                )
        return Plan(
            run=sorted((job for job in taken if job.runs), key=lambda job: not job.decode),
            lend=[job for job in running if job not in taken],
            enter=[job for job in taken if not job.runs],
            tokens=max(1, sum(taken.values())),
            limit_s=limit_s,
            given_up=given_up,
        )

    def _fit(self, job: Job, left_s: float, left_tokens: int) -> int:
        """How many of its tokens fit."""
        if left_s <= 0:
            return 0
        if job.decode:
            return job.tokens if job.cost_s <= left_s and job.tokens <= left_tokens else 0
        if not self.limits.splits:
            return min(job.tokens, left_tokens)
        fits = job.tokens if job.cost_s <= left_s else int(job.tokens * left_s / job.cost_s)
        return min(fits, left_tokens)


def _served_s(job: Job) -> float:
    return max(job.ticket.served_s, job.ticket.arrival_s)


def _split(jobs: Sequence[Job], soon_s: float) -> tuple[list[Job], list[Job]]:
    """Those that are due by then, and the others."""
    return [j for j in jobs if j.due_s < soon_s], [j for j in jobs if j.due_s >= soon_s]
