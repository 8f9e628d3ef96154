"""HALO: who computes in an iteration of a server whose services promise TTFT and TBT (HALO 5).

Tokens leave at their release times, so a request has a bank: R_1 = max(G_1, A + TTFT) and
R_k = max(G_k, R_(k-1) + TBT) for tokens generated at G_k (slack.py). With g tokens generated and T the
time of the next iteration:

    slack = R_g - t          (at the paper's iteration boundaries the same as its Equations 2 and 3:
                             + TBT - T where it computed, - T where it did not)
    urgent                   slack < T: it cannot sit out this iteration
    capacity                 sum of min(1, TBT_min / TBT_i) over all that run <= B

Each iteration has B tokens, the largest batch that keeps the strictest TBT:

1. waiting requests enter, earliest TTFT deadline first, while slots and capacity last;
2. urgent decodes take a token each;
3. prompts take what is left, earliest TTFT deadline first;
4. other decodes take the rest, least slack first; the others sit out this iteration.

``max_bank_s`` bounds what a request may have in the bank: beyond it a token is generated that its user
may never wait for. ``predictive`` chooses B anew for each iteration, as the most tokens that
end within the strictest TBT of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from horizonserve.policy.baselines import MARGIN, tokens_within
from horizonserve.policy.batch import Load, StepModel
from horizonserve.policy.lending import Job, Plan


@dataclass(frozen=True, slots=True)
class HaloLimits:
    """What an iteration may hold."""

    #: B: tokens, decodes and prompts together.
    batch_tokens: int
    #: Strictest TBT of any service: the one that B keeps.
    tbt_min_s: float
    max_bank_s: float = inf
    #: B from the predicted iteration, at most so many tokens; None: B is fixed.
    predictive_tokens: int | None = None


class Halo:
    """Plans iterations; times in seconds on the clock of the tickets."""

    def __init__(self, model: StepModel, limits: HaloLimits) -> None:
        self.model = model
        self.limits = limits

    def plan(self, running: Sequence[Job], waiting: Sequence[Job], now_s: float) -> Plan:
        """The plan of an iteration that starts now.

        ``waiting``: those that slots and KV blocks last for, earliest deadline first.
        """
        decodes = [job for job in running if job.decode]
        prefills = [job for job in running if not job.decode]
        enter = self._admitted(running, waiting)
        batch_tokens = self._batch_tokens(decodes)
        wanted = sum(job.tokens for job in (*prefills, *enter))

        slack_s = {job: bank_s(job, now_s) for job in decodes}
        limit_s = self._iteration_s(decodes, wanted, batch_tokens)
        decodes.sort(key=slack_s.__getitem__)
        urgent = [job for job in decodes if slack_s[job] < limit_s]
        left = max(0, batch_tokens - len(urgent))
        room = left - min(wanted, left)
        others = [j for j in decodes[len(urgent) :] if slack_s[j] <= self.limits.max_bank_s]
        run = urgent + others[:room]

        chosen = {*run, *prefills}
        return Plan(
            run=run + sorted(prefills, key=_deadline_s),
            lend=[job for job in decodes if job not in chosen],
            enter=enter,
            tokens=max(1, min(batch_tokens, sum(job.tokens for job in run) + wanted)),
            limit_s=limit_s,
            given_up=0,
        )

    def _admitted(self, running: Sequence[Job], waiting: Sequence[Job]) -> list[Job]:
        """The earliest of the waiting for which there is capacity; nobody is passed over."""
        free = self.limits.batch_tokens - sum(map(self._use, running))
        admitted = []
        for job in waiting:
            free -= self._use(job)
            # Sums of thirds and fifths do not come out even.
            if free < -1e-9:
                break
            admitted.append(job)
        return admitted

    def _use(self, job: Job) -> float:
        """Share of a place in every iteration that keeps the request's TBT."""
        return min(1.0, self.limits.tbt_min_s / job.ticket.tbt_s)

    def _batch_tokens(self, decodes: Sequence[Job]) -> int:
        """B of this iteration."""
        most = self.limits.predictive_tokens
        if most is None:
            return self.limits.batch_tokens
        target_s = min((job.ticket.tbt_s for job in decodes), default=inf)
        return tokens_within(self.model, target_s * (1 - MARGIN), decodes, most)

    def _iteration_s(self, decodes: Sequence[Job], wanted: int, batch_tokens: int) -> float:
        """T: how long a full iteration will take."""
        load = Load(
            decodes=min(len(decodes), batch_tokens),
            prefill_tokens=min(wanted, batch_tokens),
            attention=float(sum(job.context_tokens for job in decodes)),
            co_run=self.model.co_run,
        )
        return self.model.step_s(load)


def bank_s(job: Job, now_s: float) -> float:
    """Slack of a decode: for how long its user has tokens, those under way included."""
    ticket = job.ticket
    return ticket.due_s(job.in_flight) - ticket.tbt_s - now_s


def _deadline_s(job: Job) -> float:
    return job.ticket.deadline_s
