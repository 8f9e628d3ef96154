"""What a run says about its policy.

Per request i of class c, with arrival a, first response f, end e and target S(c):

    met       m_i = 1 iff it ended well, or was cut while streaming, and f - a <= S(c)
    missed    m_i = 0 iff it failed, timed out, f - a > S(c), or was cut at e without a first
              response when e - a > S(c)
    undecided: cut at e without a first response and e - a <= S(c); left out of everything

    attainment              A = sum m_i / n,    n = decided requests (met or missed)
    completed attainment    C = sum of m_i over ended-well requests / their number
                            (the papers' figure: it does not see what never came back)

Per text request with tokens at t_1..t_g (from its arrival), first-response target S and target B
between tokens, read on HALO's release schedule: the first is promised at S and each next one B
after the release of the one before, so that a token in advance may be used up later:

    R_1 = max(t_1, S),   R_k = max(t_k, R_(k-1) + B)
    whole     iff t_k <= R_(k-1) + B for every k >= 2, and, where it was cut at e before it ended
              well, e - a <= R_g + B
    kept      k_i = 1 iff m_i = 1 and the answer is whole. What has no B (audio, image): k_i = m_i.
              Undecided where m_i is
    at once   the same with R_1 = t_1: for a reader who starts with the first token, however early
              it came

    both promises           K = sum k_i / n;   at once: likewise
    gap p95                 of all t_k - t_(k-1) of the requests, as they came
    TPOT of a text request  (last token - first token) / (tokens - 1)
    quantile q              of k sorted values: linear between the two nearest ranks
    lower bound on a late first response: for an unanswered miss, its age at the end. p50 and p95
              of first responses count those ages too, so that losing requests cannot improve them

``Attainment``, ``ClassReport`` and ``report`` are these, by name; intervals.py holds the intervals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np

from horizonserve.bench.intervals import Interval, wilson
from horizonserve.bench.result import Result, Status
from horizonserve.slo import Output, RequestClass


class Promise(StrEnum):
    """What is counted as kept."""

    FIRST = "first response"
    BOTH = "both promises"
    AT_ONCE = "both, read at once"


@dataclass(frozen=True, slots=True)
class Targets:
    """What is promised."""

    #: First response, per class.
    slo_s: Mapping[RequestClass, float]
    #: Between the tokens of a text answer; None where nothing is promised.
    tbt_s: float | None = None

    def kept(self, result: Result, promise: Promise) -> bool | None:
        """Whether it was kept; None when the run ended before that could be known."""
        slo_s = self.slo_s[result.request_class]
        first = met(result, slo_s)
        if not first or promise is Promise.FIRST:
            return first
        if self.tbt_s is None or result.request_class.output is not Output.TEXT:
            return first
        return whole(result, slo_s if promise is Promise.BOTH else 0.0, self.tbt_s)


def met(result: Result, slo_s: float) -> bool | None:
    """Whether the first response came in time; None when that was still open."""
    if result.status in (Status.FAILED, Status.TIMEOUT):
        return False
    if result.first_s is not None:
        return result.first_s <= slo_s
    return False if result.end_s > slo_s else None


def whole(result: Result, start_s: float, tbt_s: float) -> bool:
    """Whether no token of a text answer came after its time, read from ``start_s`` on."""
    if not result.token_s:
        return True
    release_s = max(result.token_s[0], start_s)
    for at_s in result.token_s[1:]:
        due_s = release_s + tbt_s
        if at_s > due_s:
            return False
        release_s = due_s
    return result.status is Status.OK or result.end_s <= release_s + tbt_s


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
    both: Attainment
    at_once: Attainment
    completed: Attainment
    failed: int
    timed_out: int
    undecided: int
    first_p50_s: float | None
    first_p95_s: float | None
    tpot_p50_s: float | None
    tpot_p95_s: float | None
    gap_p95_s: float | None


def attainment(
    results: Iterable[Result], targets: Targets, promise: Promise = Promise.FIRST
) -> Attainment:
    """Attainment over all the results."""
    outcomes = [targets.kept(result, promise) for result in results]
    decided = [outcome for outcome in outcomes if outcome is not None]
    return Attainment(sum(decided), len(decided))


def quantile(values: Sequence[float], q: float) -> float | None:
    """Linear quantile; None without values."""
    return float(np.quantile(values, q)) if values else None


def firsts_s(results: Iterable[Result], targets: Targets) -> list[float]:
    """First responses of the decided requests; of a miss without one, its age at the end."""
    decided = (r for r in results if targets.kept(r, Promise.FIRST) is not None)
    return [r.end_s if r.first_s is None else r.first_s for r in decided]


def class_report(results: Sequence[Result], targets: Targets) -> ClassReport:
    """The figures of these results together."""
    first_s = firsts_s(results, targets)
    tpots_s = [r.tpot_s for r in results if r.tpot_s is not None]
    gaps_s = [later - at_s for r in results for at_s, later in pairwise(r.token_s)]
    return ClassReport(
        attainment=attainment(results, targets),
        both=attainment(results, targets, Promise.BOTH),
        at_once=attainment(results, targets, Promise.AT_ONCE),
        completed=attainment([r for r in results if r.status is Status.OK], targets),
        failed=sum(r.status is Status.FAILED for r in results),
        timed_out=sum(r.status is Status.TIMEOUT for r in results),
        undecided=len(results) - len(first_s),
        first_p50_s=quantile(first_s, 0.5),
        first_p95_s=quantile(first_s, 0.95),
        tpot_p50_s=quantile(tpots_s, 0.5),
        tpot_p95_s=quantile(tpots_s, 0.95),
        gap_p95_s=quantile(gaps_s, 0.95),
    )


def report(results: Sequence[Result], targets: Targets) -> dict[RequestClass | None, ClassReport]:
    """One report per class that occurs, and one of all of them under None."""
    classes = sorted({r.request_class for r in results}, key=lambda c: (c.path != "short", c))
    by_class: dict[RequestClass | None, ClassReport] = {
        name: class_report([r for r in results if r.request_class is name], targets)
        for name in classes
    }
    by_class[None] = class_report(results, targets)
    return by_class


def blocks(results: Iterable[Result], block_s: float) -> dict[int, list[Result]]:
    """The requests that arrived in each block of time; for intervals that draw blocks."""
    groups: dict[int, list[Result]] = {}
    for result in results:
        groups.setdefault(int(result.at_s // block_s), []).append(result)
    return groups


def by_block(
    results: Iterable[Result], targets: Targets, block_s: float, promise: Promise = Promise.FIRST
) -> dict[int, Attainment]:
    """Attainment of the requests that arrived in each block of time."""
    return {
        name: attainment(group, targets, promise)
        for name, group in blocks(results, block_s).items()
    }
