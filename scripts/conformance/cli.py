"""The command: fetch, run every configuration in a fresh process, compare with the stock one."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.compare import Results, judge, passed
from conformance.hfstub import make_cache
from conformance.sdist import VERSION, FetchError, default_cache, ensure_suite

FILES = (
    "test_scheduler",
    "test_async_scheduler",
    "test_deferred_block_free",
    "test_mamba_align_chunk_split",
    "test_encoder_cache_manager",
)
SLOW_FILES = ("test_priority_scheduler_random",)
LABELLINGS = ("short", "long", "mixed")
STOCK = (
    "vllm_omni.core.sched.omni_ar_scheduler.OmniARScheduler",
    "vllm_omni.core.sched.omni_ar_scheduler.OmniARAsyncScheduler",
)
OURS = (
    "horizonserve.serving.schedulers.HorizonARScheduler",
    "horizonserve.serving.schedulers.HorizonARAsyncScheduler",
)
# Class in broken.py -> the kind of violation that must be among those reported
BROKEN = {
    "LosesRequest": "lost after schedule",
    "ReplacesQueue": "waiting replaced by schedule",
    "QueuesTwice": "duplicate after add_request",
    "LeaksBlocks": "leak",
    "SurvivesAbort": "immortal",
    "Raises": "raised LookupError in schedule",
}
# Fewer means that the environment is broken (a missing file, say), and then the gate is empty.
MIN_STOCK_PASSES = 240
_ROW = "{:<18}{:>7}{:>7}{:>10}{:>11}{:>7}"
SCRIPTS = Path(__file__).resolve().parents[1]


class RunError(RuntimeError):
    """A configuration produced no results."""


@dataclass(frozen=True)
class Configuration:
    name: str
    classes: tuple[str, str]
    labels: str = "none"
    policy: str = ""


@dataclass(frozen=True)
class Runner:
    suite: Path
    work: Path
    files: Sequence[str]
    only: str
    test_timeout_s: int
    run_timeout_s: int

    def run(self, config: Configuration) -> tuple[Results, float]:
        # vLLM's example connector writes into the current directory.
        home = self.work / config.name
        home.mkdir(parents=True, exist_ok=True)
        report, log = home / "results.json", home / "pytest.log"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", *self._options()]
        command += [str(self.suite / "tests" / "v1" / "core" / f"{f}.py") for f in self.files]
        started = time.monotonic()
        with log.open("w") as out:
            try:
                done = subprocess.run(
                    command,
                    cwd=home,
                    env=self._environment(config, report),
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=self.run_timeout_s,
                )
            except subprocess.TimeoutExpired:
                raise RunError(f"{config.name}: over {self.run_timeout_s} s; see {log}") from None
        # 0: all passed, 1: some failed; anything else means that pytest could not run the tests.
        if done.returncode not in (0, 1) or not report.is_file():
            tail = "\n".join(log.read_text().splitlines()[-15:])
            raise RunError(f"{config.name}: pytest exited with {done.returncode}:\n{tail}")
        results: Results = json.loads(report.read_text())
        return results, time.monotonic() - started

    def _options(self) -> list[str]:
        # The suite's conftest is for model tests: it needs more packages and collects garbage
        # after every test.
        options = ["-q", "--noconftest", "-p", "conformance.plugin", "-p", "no:cacheprovider"]
        options += ["-c", os.devnull, "--rootdir", str(self.suite), "--tb=short"]
        return options + (["-k", self.only] if self.only else [])

    def _environment(self, config: Configuration, report: Path) -> dict[str, str]:
        # The caller's own settings would make the result depend on the shell it was started from.
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HORIZON_", "PYTEST_"))}
        paths = [SCRIPTS, SCRIPTS.parent / "src", self.suite]
        env |= {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "HF_HOME": str(self.work / "hf"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "CONFORMANCE_SYNC": config.classes[0],
            "CONFORMANCE_ASYNC": config.classes[1],
            "CONFORMANCE_LABELS": config.labels,
            "CONFORMANCE_REPORT": str(report),
            "CONFORMANCE_TEST_TIMEOUT_S": str(self.test_timeout_s),
        }
        if config.policy:
            env["HORIZON_SCHEDULER"] = config.policy
            # vLLM's tests count steps by slots and budget, which lending decides anew.
            env["HORIZON_LENDING"] = "off"
        return env


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    work = args.work.resolve()
    try:
        suite = ensure_suite(args.cache.expanduser().resolve())
        make_cache(work / "hf")
        files = [*FILES, *(SLOW_FILES if args.full else ())]
        runner = Runner(suite, work, files, args.only, args.test_timeout, args.run_timeout)
        ok, summary = (_self_check if args.self_check else _gate)(runner, args)
    except (FetchError, RunError) as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 2
    target = work / ("self-check.json" if args.self_check else "conformance.json")
    target.write_text(json.dumps(summary, indent=1))
    print(f"\n{'ok' if ok else 'FAILED'}; details in {target}")
    return 0 if ok else 1


def _gate(runner: Runner, args: argparse.Namespace) -> tuple[bool, dict[str, Any]]:
    print(f"vLLM {VERSION} scheduler tests: {', '.join(runner.files)}")
    print(_ROW.format("configuration", "passed", "failed", "reordered", "violations", "s"))
    stock, seconds = runner.run(Configuration("stock", STOCK))
    _row("stock", stock, "-", "-", seconds)
    if not args.only and len(passed(stock)) < MIN_STOCK_PASSES:
        raise RunError(
            f"the stock schedulers pass {len(passed(stock))} tests, expected at least "
            f"{MIN_STOCK_PASSES}; the environment is incomplete, see {runner.work}/stock/pytest.log"
        )
    summary: dict[str, Any] = {"stock": {"seconds": seconds, "results": stock}}
    verdicts = {}
    for policy in args.policy:
        for labels in args.labels:
            name = f"{policy}-{labels}"
            classes = (args.sync_class, args.async_class)
            ours, seconds = runner.run(Configuration(name, classes, labels, policy))
            verdict = judge(stock, ours, order_matters=labels != "mixed")
            _row(name, ours, len(verdict.reordered), len(verdict.violations), seconds)
            verdicts[name] = verdict
            summary[name] = {"seconds": seconds, "verdict": verdict.as_dict(), "results": ours}
    for name, verdict in verdicts.items():
        _lines(f"{name}: passes with the stock schedulers, fails with ours", verdict.failures)
        _lines(f"{name}: invariant violated by ours only", verdict.violations)
        _lines(f"{name}: expected reordering (the test's own assertion)", verdict.reordered)
        _lines(f"{name}: fails with the stock schedulers, passes with ours", verdict.gained)
    return all(v.ok for v in verdicts.values()), summary


def _self_check(runner: Runner, args: argparse.Namespace) -> tuple[bool, dict[str, Any]]:
    """Schedulers that are wrong on purpose against the invariants."""
    stock, _ = runner.run(Configuration("stock", STOCK))
    summary: dict[str, Any] = {}
    for name, expected in BROKEN.items():
        classes = (f"conformance.broken.{name}", STOCK[1])
        results, seconds = runner.run(Configuration(f"broken-{name}", classes))
        known = {(t, v["kind"]) for t, r in stock.items() for v in r["violations"]}
        kinds = Counter(
            v["kind"]
            for test, result in results.items()
            for v in result["violations"]
            if (test, v["kind"]) not in known
        )
        summary[name] = {"expected": expected, "found": kinds, "seconds": seconds}
        print(f"{name:<15} {'caught' if kinds[expected] else 'MISSED'}: {dict(kinds)}")
    return all(entry["found"][entry["expected"]] for entry in summary.values()), summary


def _row(name: str, results: Results, reordered: object, violations: object, s: float) -> None:
    good = len(passed(results))
    bad = len(results) - good
    print(_ROW.format(name, good, bad, reordered, violations, round(s)), flush=True)


def _lines(title: str, lines: Sequence[str]) -> None:
    if lines:
        print(f"\n{title} ({len(lines)}):")
        for line in lines:
            print(f"  {line}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__)
    add = parser.add_argument
    add("--work", type=Path, required=True, help="logs and results go here")
    add("--cache", type=Path, default=default_cache(), help="downloads (default: %(default)s)")
    add("--full", action="store_true", help="also the slow random test of the priority policy")
    add("--policy", nargs="+", default=["horizon"], help="values of HORIZON_SCHEDULER")
    add("--labels", nargs="+", choices=LABELLINGS, default=list(LABELLINGS))
    add("--sync-class", default=OURS[0], help="dotted path of the scheduler under test")
    add("--async-class", default=OURS[1])
    add("--only", default="", metavar="EXPR", help="pytest -k, for looking into one failure")
    add("--test-timeout", type=int, default=120, metavar="S", help="processor time of one test")
    add("--run-timeout", type=int, default=7200, metavar="S", help="wall time of one configuration")
    add("--self-check", action="store_true", help="prove that wrong schedulers are caught")
    return parser.parse_args(argv)
