"""Leases that no policy would give: any of them must leave the tokens as they are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from horizonserve.policy.halo import MOST_ENTER, Decodes, HaloLimits, Iteration
from horizonserve.policy.lending import Job, Plan
from horizonserve.policy.streams import Streams


class RandomLending:
    """Leases a random share of those that run; everything else is random too."""

    def __init__(self, seed: str, share: float) -> None:
        self.random = random.Random(seed)
        self.share = share

    def plan(self, running: Sequence[Job], waiting: Sequence[Job], now_s: float) -> Plan:
        run: list[Job] = []
        lend: list[Job] = []
        for job in running:
            (lend if self.random.random() < self.share else run).append(job)
        enter = [job for job in waiting if self.random.random() < 0.5]
        self.random.shuffle(run)
        run.sort(key=lambda job: not job.decode)
        tokens = sum(
            job.tokens if job.decode else self.random.randint(1, job.tokens)
            for job in [*run, *enter]
        )
        return Plan(run, lend, enter, max(1, tokens), limit_s=1.0, given_up=0)


class RandomHalo:
    """The same for HALO's iterations."""

    def __init__(self, seed: str, share: float, limits: HaloLimits) -> None:
        self.random = random.Random(seed)
        self.share = share
        self.limits = limits
        self.streams = Streams()

    def plan(
        self,
        decodes: Decodes,
        prefills: Sequence[Job],
        waiting: Callable[[int], Sequence[Job]] | None,
        now_s: float,
    ) -> Iteration:
        order = list(range(len(decodes.tbt_s)))
        self.random.shuffle(order)
        computing = sum(self.random.random() >= self.share for _ in order)
        enter = [
            job for job in (waiting(MOST_ENTER) if waiting else []) if self.random.random() < 0.5
        ]
        begun = self.random.sample(list(prefills), len(prefills))
        tokens = computing + sum(self.random.randint(1, job.tokens) for job in [*begun, *enter])
        return Iteration(
            np.array(order, np.intp),
            computing,
            begun,
            enter,
            max(1, tokens),
            limit_s=1.0,
            context_tokens=0.0,
        )
