"""HALO: who computes in an iteration of a server whose services promise TTFT and TBT (HALO 5).

Tokens leave at their release times, so a request has a bank: R_1 = max(G_1, A + TTFT) and
R_k = max(G_k, R_(k-1) + TBT) for tokens generated at G_k (slack.py). With g tokens generated and T
the time of the next iteration:

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

Decodes are arrays, one entry each: with hundreds of them everything else in this file costs less
than looking at each of them would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horizonserve.policy.baselines import MARGIN
from horizonserve.policy.batch import Load, StepModel
from horizonserve.policy.lending import Job
from horizonserve.slo import Path

#: Waiting requests that enter in one iteration at most; it has a token for hardly as many.
MOST_ENTER: Final = 32
#: Sums of thirds and fifths do not come out even.
_ROUNDING: Final = 1e-9

Floats = NDArray[np.float64]


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


class Decodes(NamedTuple):
    """Requests that generate, one entry each; times in seconds on one clock."""

    #: R_g, with the tokens that steps under way will generate; -inf without a promised TBT.
    released_s: Floats
    tbt_s: Floats
    context_tokens: Floats


class Iteration(NamedTuple):
    """What an iteration is to do."""

    #: Indices of the decodes by slack; the first ``computing`` of them compute, the others sit out.
    order: NDArray[np.intp]
    computing: int
    #: Prompts that run already, earliest deadline first, and those that enter.
    prefills: list[Job]
    enter: list[Job]
    tokens: int
    #: T: how long it will take.
    limit_s: float
    #: Sum of the contexts that the computing decodes read.
    context_tokens: float


class Halo:
    """Plans iterations; times in seconds on the clock of the tickets."""

    def __init__(self, model: StepModel, limits: HaloLimits) -> None:
        self.model = model
        self.limits = limits

    def plan(
        self,
        decodes: Decodes,
        prefills: Sequence[Job],
        waiting: Callable[[int], Sequence[Job]],
        now_s: float,
    ) -> Iteration:
        """The plan of an iteration that starts now.

        ``waiting``: at most so many that slots and KV blocks last for, earliest deadline first.
        """
        slack_s = decodes.released_s - now_s
        order = np.argsort(slack_s, kind="stable")
        slack_s = slack_s[order]
        contexts = decodes.context_tokens[order]
        batch_tokens = self._batch_tokens(contexts)
        enter = self._admitted(decodes, prefills, waiting, batch_tokens)
        wanted = sum(job.tokens for job in (*prefills, *enter))
        limit_s = self._iteration_s(contexts[:batch_tokens], wanted, batch_tokens)

        urgent = int(np.searchsorted(slack_s, limit_s, side="left"))
        saving = int(np.searchsorted(slack_s, self.limits.max_bank_s, side="right"))
        room = max(0, batch_tokens - urgent - wanted)
        computing = max(urgent, min(saving, urgent + room))
        if not (computing or wanted):
            computing = min(len(order), batch_tokens)
        return Iteration(
            order=order,
            computing=computing,
            prefills=sorted(prefills, key=_deadline_s),
            enter=enter,
            tokens=max(1, min(batch_tokens, computing + wanted)),
            limit_s=limit_s,
            context_tokens=float(contexts[:computing].sum()),
        )

    def _admitted(
        self,
        decodes: Decodes,
        prefills: Sequence[Job],
        waiting: Callable[[int], Sequence[Job]],
        batch_tokens: int,
    ) -> list[Job]:
        """The earliest of the waiting for which there is capacity; nobody is passed over."""
        least_s = self.limits.tbt_min_s
        free = batch_tokens - float(np.minimum(1.0, least_s / decodes.tbt_s).sum())
        free -= sum(map(self._use, prefills))
        idle = not (len(decodes.tbt_s) or prefills)
        if free <= 0 and not idle:
            return []
        some = waiting(MOST_ENTER)
        admitted = []
        for job in some:
            free -= self._use(job)
            if free < -_ROUNDING:
                break
            admitted.append(job)
        # Where nobody runs, one that needs more than there is must not wait for ever.
        return admitted or list(some[:idle])

    def _use(self, job: Job) -> float:
        """Share of a place in every iteration that keeps the request's TBT."""
        if job.ticket.path is Path.LONG:
            return 1.0
        return min(1.0, self.limits.tbt_min_s / job.ticket.tbt_s)

    def _batch_tokens(self, contexts: Floats) -> int:
        """B of this iteration; ``contexts`` of the decodes by slack."""
        most = self.limits.most_tokens
        if self.limits.batch_tokens is not None:
            return min(most, self.limits.batch_tokens)
        model = self.model
        left_s = (1 - MARGIN) * self.limits.tbt_min_s - model.fixed_s
        ends_s = np.cumsum(model.decode_s(0) + (model.decode_s(1) - model.decode_s(0)) * contexts)
        fit = int(np.searchsorted(ends_s, left_s, side="right"))
        if fit < len(contexts):
            return max(1, min(most, fit))
        if fit:
            left_s -= float(ends_s[-1])
        token_s = model.prefill_s(1, 0)
        more = int(min(most, max(0.0, left_s) / token_s)) if token_s > 0 else most
        return max(1, min(most, fit + more))

    def _iteration_s(self, contexts: Floats, wanted: int, batch_tokens: int) -> float:
        """T: how long a full iteration will take."""
        load = Load(
            decodes=len(contexts),
            prefill_tokens=min(wanted, batch_tokens - len(contexts)),
            attention=float(contexts.sum()),
            co_run=self.model.co_run,
        )
        return self.model.step_s(load)


def _deadline_s(job: Job) -> float:
    return job.ticket.deadline_s
