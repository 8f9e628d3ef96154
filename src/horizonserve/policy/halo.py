"""HALO: who computes in an iteration of a server whose services promise TTFT and TBT (HALO 5).

Tokens leave at their release times, so a request has a bank: R_1 = max(G_1, A + TTFT) and R_k =
max(G_k, R_(k-1) + TBT) for tokens generated at G_k (slack.py). With g tokens generated and T the
time of the next iteration:

    slack = R_g - t          (at the paper's iteration boundaries the same as its Equations 2 and 3:
                             + TBT - T where it computed, - T where it did not)
    urgent                   slack < T: it cannot sit out this iteration
    capacity                 sum of min(1, TBT_min / TBT_i) over all that run <= B

Each iteration has B tokens, the largest batch that keeps the strictest TBT:

1. waiting requests enter, earliest TTFT deadline first, while slots and capacity last;
2. urgent decodes take a token each, least slack first;
3. prompts take what is left, earliest TTFT deadline first;
4. other decodes take the rest, least slack first; the others sit out this iteration.

B is fixed, or found anew for each iteration from the predicted times: the decodes with the least
slack, then prompt tokens, for as long as the iteration ends within the strictest TBT. A decode with
more than ``max_bank_s`` in the bank sits out where others compute: its token would be one that its
user may never wait for, and makes the iteration longer. A request for a later stage (LONG) has no
TBT: it is urgent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from horizonserve.policy.baselines import MARGIN
from horizonserve.policy.batch import Load, StepModel
from horizonserve.policy.lending import Job, Plan
from horizonserve.slo import Path


@dataclass(frozen=True, slots=True)
class HaloLimits:
    """What an iteration may hold."""

    #: Strictest TBT of any service: the one that B keeps.
    tbt_min_s: float
    #: Tokens, decodes and prompts together, at most.
    most_tokens: int
    #: B, at most ``most_tokens``; None: from the predicted times.
    batch_tokens: int | None = None
    max_bank_s: float = inf


class Halo:
    """Plans iterations; times in seconds on the clock of the tickets."""

    def __init__(self, model: StepModel, limits: HaloLimits) -> None:
        self.model = model
        self.limits = limits

    def plan(self, running: Sequence[Job], waiting: Sequence[Job], now_s: float) -> Plan:
        """The plan of an iteration that starts now.

        ``waiting``: those that slots and KV blocks last for, earliest deadline first.
        """
        slack_s = {job: bank_s(job, now_s) for job in running if job.decode}
        decodes = sorted(slack_s, key=slack_s.__getitem__)
        prefills = sorted((job for job in running if not job.decode), key=_deadline_s)
        batch_tokens = self._batch_tokens(decodes)
        enter = self._admitted(running, waiting, batch_tokens)
        wanted = sum(job.tokens for job in (*prefills, *enter))
        limit_s = self._iteration_s(decodes, wanted, batch_tokens)

        urgent = [job for job in decodes if slack_s[job] < limit_s]
        room = max(0, batch_tokens - len(urgent) - wanted)
        others = decodes[len(urgent) :]
        saving = [job for job in others if slack_s[job] <= self.limits.max_bank_s]
        run = urgent + saving[:room]
        if not (run or wanted):
            run = others[:batch_tokens]
        chosen = set(run)
        return Plan(
            run=run + prefills,
            lend=[job for job in decodes if job not in chosen],
            enter=enter,
            tokens=max(1, min(batch_tokens, sum(job.tokens for job in run) + wanted)),
            limit_s=limit_s,
            given_up=0,
        )

    def _admitted(
        self, running: Sequence[Job], waiting: Sequence[Job], batch_tokens: int
    ) -> list[Job]:
        """The earliest of the waiting for which there is capacity; nobody is passed over."""
        free = batch_tokens - sum(map(self._use, running))
        admitted = []
        for job in waiting:
            free -= self._use(job)
            # Sums of thirds and fifths do not come out even.
            if free < -1e-9:
                break
            admitted.append(job)
        # Where nobody runs, one that needs more than there is must not wait for ever.
        return admitted or list(waiting[: not running])

    def _use(self, job: Job) -> float:
        """Share of a place in every iteration that keeps the request's TBT."""
        if job.ticket.path is Path.LONG:
            return 1.0
        return min(1.0, self.limits.tbt_min_s / job.ticket.tbt_s)

    def _batch_tokens(self, decodes: Sequence[Job]) -> int:
        """B of this iteration; ``decodes`` by slack."""
        most = self.limits.most_tokens
        if self.limits.batch_tokens is not None:
            return min(most, self.limits.batch_tokens)
        left_s = (1 - MARGIN) * self.limits.tbt_min_s - self.model.fixed_s
        for count, job in enumerate(decodes):
            left_s -= self.model.decode_s(job.context_tokens)
            if left_s < 0:
                return max(1, min(most, count))
        token_s = self.model.prefill_s(1, 0)
        more = int(min(most, max(0.0, left_s) / token_s)) if token_s > 0 else most
        return max(1, min(most, len(decodes) + more))

    def _iteration_s(self, decodes: Sequence[Job], wanted: int, batch_tokens: int) -> float:
        """T: how long a full iteration will take."""
        some = decodes[:batch_tokens]
        load = Load(
            decodes=len(some),
            prefill_tokens=min(wanted, batch_tokens - len(some)),
            attention=float(sum(job.context_tokens for job in some)),
            co_run=self.model.co_run,
        )
        return self.model.step_s(load)


def bank_s(job: Job, now_s: float) -> float:
    """Slack of a decode: for how long its user has tokens, those under way included."""
    ticket = job.ticket
    if ticket.path is Path.LONG:
        return -inf
    return ticket.due_s(job.in_flight) - ticket.tbt_s - now_s


def _deadline_s(job: Job) -> float:
    return job.ticket.deadline_s
