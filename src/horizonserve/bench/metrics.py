"""What a run says about its policy.

Per request i of class c, with arrival a, first response f, end e and target S(c):

    met       m_i = 1 iff it ended well, or was cut while streaming, and f - a <= S(c)
    missed    m_i = 0 iff it failed, timed out, f - a > S(c), or was cut at e without a first
              response when e - a > S(c)
    undecided: cut at e without a first response and e - a <= S(c); left out of everything

    attainment              A = sum m_i / n,    n = decided requests (met or missed)
    completed attainment    C = sum of m_i over ended-well requests / their number
                            (the papers' figure: it does not see what never came back)
    TPOT of a text request  (last token - first token) / (tokens - 1)
    quantile q              of k sorted values: linear between the two nearest ranks
    lower bound on a late first response: for an unanswered miss, its age at the end. p50 and p95
              of first responses count those ages too, so that losing requests cannot improve them

``Attainment``, ``ClassReport`` and ``report`` are these, by name; intervals.py holds the intervals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from horizonserve.bench.intervals import Interval, wilson
from horizonserve.bench.result import Result, Status
from horizonserve.slo import RequestClass

SloS = Mapping[RequestClass, float]


def met(result: Result, slo_s: float) -> bool | None:
    """Whether the promise was kept; None when the run ended before that could be known."""
    if result.status in (Status.FAILED, Status.TIMEOUT):
        return False
    if result.first_s is not None:
        return result.first_s <= slo_s
    return False if result.end_s > slo_s else None


@dataclass(frozen=True, slots=True)
class Attainment:
    """Share of kept promises."""

    met: int
    decided: int

    @property
    def value(self) -> float | None:
        return self.met / self.decided if self.decided else None

    @property
    def interval(self) -> Interval:
        """95% for one run, as if requests were independent."""
        return wilson(self.met, self.decided)

    def __add__(self, other: Attainment) -> Attainment:
        return Attainment(self.met + other.met, self.decided + other.decided)


@dataclass(frozen=True, slots=True)
class ClassReport:
    """Figures of one class, or of all."""

    attainment: Attainment
    completed: Attainment
    failed: int
    timed_out: int
    undecided: int
    first_p50_s: float | None
    first_p95_s: float | None
    tpot_p50_s: float | None
    tpot_p95_s: float | None


def attainment(results: Iterable[Result], slo_s: SloS) -> Attainment:
    """Attainment over all the results."""
    outcomes = [met(result, slo_s[result.request_class]) for result in results]
    decided = [outcome for outcome in outcomes if outcome is not None]
    return Attainment(sum(decided), len(decided))


def quantile(values: Sequence[float], q: float) -> float | None:
    """Linear quantile; None without values."""
    return float(np.quantile(values, q)) if values else None


def class_report(results: Sequence[Result], slo_s: SloS) -> ClassReport:
    """The figures of these results together."""
    decided = [r for r in results if met(r, slo_s[r.request_class]) is not None]
    firsts_s = [r.end_s if r.first_s is None else r.first_s for r in decided]
    tpots_s = [r.tpot_s for r in results if r.tpot_s is not None]
    return ClassReport(
        attainment=attainment(results, slo_s),
        completed=attainment([r for r in results if r.status is Status.OK], slo_s),
        failed=sum(r.status is Status.FAILED for r in results),
        timed_out=sum(r.status is Status.TIMEOUT for r in results),
        undecided=len(results) - len(decided),
        first_p50_s=quantile(firsts_s, 0.5),
        first_p95_s=quantile(firsts_s, 0.95),
        tpot_p50_s=quantile(tpots_s, 0.5),
        tpot_p95_s=quantile(tpots_s, 0.95),
    )


def report(results: Sequence[Result], slo_s: SloS) -> dict[RequestClass | None, ClassReport]:
    """One report per class that occurs, and one of all of them under None."""
    classes = sorted({r.request_class for r in results}, key=lambda c: (c.path != "short", c))
    by_class: dict[RequestClass | None, ClassReport] = {
        name: class_report([r for r in results if r.request_class is name], slo_s)
        for name in classes
    }
    by_class[None] = class_report(results, slo_s)
    return by_class


def by_block(results: Iterable[Result], slo_s: SloS, block_s: float) -> dict[int, Attainment]:
    """Attainment of the requests that arrived in each block of time; for paired intervals."""
    groups: dict[int, list[Result]] = {}
    for result in results:
        groups.setdefault(int(result.at_s // block_s), []).append(result)
    return {name: attainment(group, slo_s) for name, group in groups.items()}
