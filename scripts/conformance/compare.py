"""Judge one configuration by the stock one. Plain data in, plain data out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Results = Mapping[str, Mapping[str, Any]]

# Tests that state what was scheduled by indexing the step's output instead of by an assertion.
# A list and not a rule: any other KeyError may be ours.
STATES_BY_LOOKUP = frozenset(
    {
        "tests/v1/core/test_async_scheduler.py::test_prefix_caching_for_multi_turn",
        "tests/v1/core/test_scheduler.py::test_schedule_partial_requests",
    }
)


@dataclass(frozen=True)
class Verdict:
    """What a configuration does that the stock schedulers do not do; lines for people."""

    failures: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    reordered: list[str] = field(default_factory=list)
    gained: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failures and not self.violations

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def passed(results: Results) -> set[str]:
    return {test for test, result in results.items() if result["outcome"] == "passed"}


def judge(stock: Results, ours: Results, *, order_matters: bool) -> Verdict:
    """`order_matters=False`: a test may fail by its own assertion, but by nothing else."""
    verdict = Verdict(gained=sorted(passed(ours) - passed(stock)))
    for test in sorted(passed(stock) - passed(ours)):
        result = ours.get(test)
        if result is None:
            verdict.failures.append(f"{test}: not run")
            continue
        line = f"{test}: {result.get('error', result['outcome'])} [{result.get('where', '')}]"
        cause = result.get("cause")
        own = cause == "assertion" or (cause == "lookup" and test in STATES_BY_LOOKUP)
        reordered = own and not order_matters
        (verdict.reordered if reordered else verdict.failures).append(line)
    for test, result in sorted(ours.items()):
        known = {v["kind"] for v in stock.get(test, {}).get("violations", ())}
        for violation in result["violations"]:
            if violation["kind"] not in known:
                verdict.violations.append(f"{test}: {violation['kind']}: {violation['detail']}")
    return verdict
