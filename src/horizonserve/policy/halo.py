"""HALO: who computes in an iteration of a server whose services promise TTFT and TBT (HALO 5).

Tokens leave at their release times, so a request has a bank: R_1 = max(G_1, A + TTFT) and
R_k = max(G_k, R_(k-1) + TBT) for tokens generated at G_k (slack.py). With g tokens generated and T
the time of the next iteration:

    slack = R_g - t          (at the paper's iteration boundaries the same as its Equations 2 and 3:
                             + TBT - T where it computed, - T where it did not)
    urgent                   slack < T: it cannot sit out this iteration
    use                      u_i = min(1, TBT_min / TBT_i): in how many iterations it computes
    capacity                 sum of u_i over all that run <= B

Each iteration has B tokens, the largest batch that keeps the strictest TBT:

1. waiting requests enter, earliest TTFT deadline first (edf.py), while slots and capacity last;
2. urgent decodes take a token each, least slack first;
3. prompts take what is left, earliest TTFT deadline first;
4. other decodes take the rest, least slack first; the others sit out this iteration.

B is a number of tokens, or with ``batch_tokens=None`` a time: an iteration is filled, in that
order, as long as it is predicted to end within the strictest TBT, and capacity is the sum of u_i
times what a token of i takes. Where every decode has time in its bank the iteration may be longer
by that (LONGEST at most): tokens in longer iterations cost less, and the bank absorbs what a margin
would waste. A decode with more than ``max_bank_s`` in the bank sits out where
others compute: its token would be one that its user may never wait for, and makes the iteration
longer. A request for a later stage (LONG) has no TBT: it is urgent.

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
from horizonserve.policy.streams import Streams
from horizonserve.slo import Path

#: Waiting requests that enter in one iteration at most; it has a token for hardly as many.
MOST_ENTER: Final = 32
#: How long an iteration may be, in strictest TBTs; the bank that more would need is hardly there.
LONGEST: Final = 1.5
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
    #: B, at most ``most_tokens``; None: as many as are predicted to end in time.
    batch_tokens: int | None = None
    max_bank_s: float = inf
    #: Whether prompts whose TTFT deadline has passed go behind the others; not in the paper.
    lost_last: bool = False


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
        #: What ``decodes`` of the next plan are made of.
        self.streams = Streams()

    def plan(
        self,
        decodes: Decodes,
        prefills: Sequence[Job],
        waiting: Callable[[int], Sequence[Job]] | None,
        now_s: float,
    ) -> Iteration:
        """The plan of an iteration that starts now.

        ``waiting``: at most so many that slots and KV blocks last for, earliest deadline first;
        None where nobody waits.
        """
        slack_s = decodes.released_s - now_s
        order = slack_s.argsort(kind="stable")
        slack_s, context_tokens = slack_s[order], decodes.context_tokens[order]
        each = self._cost(context_tokens)
        # What the decodes cost when the first so many of them compute.
        costs = each.cumsum()
        enter: list[Job] = []
        if waiting is not None:
            uses = np.minimum(1.0, self.limits.tbt_min_s / decodes.tbt_s[order])
            idle = not (len(order) or prefills)
            enter = self._admitted(float(uses @ each), prefills, waiting, idle)
        wanted = sum(job.tokens for job in (*prefills, *enter))
        limit_s = self._limit_s(decodes, context_tokens, wanted, now_s)

        room = self._room(limit_s)
        # However long a token takes, one decode computes.
        most = self.limits.most_tokens
        fit = min(most, max(1, int(costs.searchsorted(room, "right"))))
        urgent = min(fit, int(slack_s.searchsorted(limit_s, "left")))
        saving = int(slack_s.searchsorted(self.limits.max_bank_s, "right"))
        left = room - (float(costs[urgent - 1]) if urgent else 0.0)
        prompt_tokens = min(wanted, most - urgent, self._tokens(left))
        room -= prompt_tokens * self._prompt_cost
        others = min(saving, most - prompt_tokens, int(costs.searchsorted(room, "right")))
        computing = max(urgent, others)
        if not (computing or prompt_tokens):
            computing = min(len(order), fit)
        return Iteration(
            order=order,
            computing=computing,
            prefills=self._by_deadline(prefills, now_s),
            enter=enter,
            tokens=max(1, computing + prompt_tokens),
            limit_s=limit_s,
            context_tokens=float(context_tokens[:computing].sum()),
        )

    def _by_deadline(self, prefills: Sequence[Job], now_s: float) -> list[Job]:
        lost_last = self.limits.lost_last

        def place(job: Job) -> tuple[bool, float]:
            deadline_s = job.ticket.deadline_s
            return lost_last and deadline_s < now_s, deadline_s

        return sorted(prefills, key=place)

    def _admitted(
        self,
        used: float,
        prefills: Sequence[Job],
        waiting: Callable[[int], Sequence[Job]],
        idle: bool,
    ) -> list[Job]:
        """The earliest of the waiting for which there is capacity; nobody is passed over.

        ``used``: what the decodes take of it; ``idle``: whether nobody runs.
        """
        free = self._room(self._usual_s) - used - sum(map(self._use, prefills))
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
        """What keeping its TBT will cost on average in each iteration, once a request generates."""
        ticket = job.ticket
        use = 1.0 if ticket.path is Path.LONG else min(1.0, self.limits.tbt_min_s / ticket.tbt_s)
        context_tokens = np.array([job.context_tokens + job.tokens], np.float64)
        return use * float(self._cost(context_tokens)[0])

    # B and what is counted against it: tokens, or seconds.

    @property
    def _usual_s(self) -> float:
        """Of an iteration that keeps the strictest TBT whatever is in the bank."""
        return (1 - MARGIN) * self.limits.tbt_min_s

    def _room(self, limit_s: float) -> float:
        """In an iteration that may take so long."""
        if self.limits.batch_tokens is not None:
            return min(self.limits.most_tokens, self.limits.batch_tokens)
        left_s = limit_s - self.model.fixed_s
        # Where an iteration takes longer than that whatever it holds, it had better hold something.
        return max(left_s, self.model.fixed_s)

    def _cost(self, contexts: Floats) -> Floats:
        """Of one more decode, by context."""
        if self.limits.batch_tokens is not None:
            return np.ones_like(contexts)
        token_s = self.model.decode_s(0)
        return token_s + (self.model.decode_s(1) - token_s) * contexts

    @property
    def _prompt_cost(self) -> float:
        """Of one more token of a prompt."""
        return 1.0 if self.limits.batch_tokens is not None else self.model.prefill_s(1, 0)

    def _tokens(self, room: float) -> int:
        """Tokens of prompts that there is room for."""
        most = self.limits.most_tokens
        if self._prompt_cost * most <= room:
            return most
        return int(max(0.0, room) / self._prompt_cost)

    def _limit_s(
        self, decodes: Decodes, context_tokens: Floats, wanted: int, now_s: float
    ) -> float:
        """T: how long the iteration will take at most; ``context_tokens``: by slack."""
        if self.limits.batch_tokens is None:
            # When the first token that must not be late is due.
            due_s = float((decodes.released_s + decodes.tbt_s).min(initial=inf)) - now_s
            longest_s = LONGEST * self.limits.tbt_min_s
            return max(self._usual_s, min((1 - MARGIN) * due_s, longest_s))
        room = int(self._room(inf))
        some = context_tokens[:room]
        load = Load(
            decodes=len(some),
            prefill_tokens=min(wanted, room - len(some)),
            attention=float(some.sum()),
            co_run=self.model.co_run,
        )
        return self.model.step_s(load)
