"""Leases that no policy would give: any of them must leave the tokens as they are."""

from __future__ import annotations

import random
from collections.abc import Sequence

from horizonserve.policy.lending import Job, Plan


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
