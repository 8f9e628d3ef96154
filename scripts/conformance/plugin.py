"""pytest plugin: vLLM's scheduler tests against other classes, labelled traffic, invariants.

Configured by the environment, because it is loaded in a fresh process per configuration:
CONFORMANCE_SYNC, CONFORMANCE_ASYNC  dotted paths of the scheduler classes; unset: vLLM's own
CONFORMANCE_LABELS                   none | short | long | mixed
CONFORMANCE_REPORT                   file that receives the results as JSON
CONFORMANCE_TEST_TIMEOUT_S           processor seconds per test
No upstream file is edited: the classes are swapped in the modules that have imported them.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import pytest

from conformance.invariants import Recorder, drain, watched

MARKERS = ("cpu_test", "skip_global_cleanup", "slow_test", "optional")
SHORT, LONG = 0, 2  # values of omni_final_stage_id: text ends in stage 0, speech in stage 2


class TestTookTooLong(BaseException):
    """A scheduler that hides a request for ever makes `while has_requests()` loop for ever.

    Not an Exception, because the code under test may catch those.
    """

    __test__ = False


class Labels:
    """The final stage of each request, by its id, so that a streaming session keeps its own."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.stages: dict[str, int] = {}

    def stage(self, request_id: str) -> int:
        fixed = {"short": SHORT, "long": LONG}.get(self.mode)
        if fixed is not None:
            return fixed
        return self.stages.setdefault(request_id, (SHORT, LONG)[len(self.stages) % 2])


def label_requests(request_cls: type[Any], labels: Labels) -> None:
    original = request_cls.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.additional_information is None:
            stage = labels.stage(self.request_id)
            self.additional_information = {"omni_final_stage_id": stage}

    request_cls.__init__ = init


def classify(error: BaseException, trace: TracebackType | None) -> str:
    """`assertion`: a test's own statement about the outcome; `lookup`: its own failed indexing.

    Anything else is `error`.
    The deciding frame is the innermost one in the tests, vLLM, vLLM-Omni or HorizonServe, so that
    an assertion raised inside unittest.mock or pytest.raises belongs to the test that uses it.
    """
    owner = package = ""
    while trace is not None:
        package = str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0]
        if package in ("tests", "vllm", "vllm_omni", "horizonserve"):
            owner = package
        trace = trace.tb_next
    if owner == "tests" and isinstance(error, AssertionError | pytest.fail.Exception):
        return "assertion"
    return "lookup" if package == "tests" and isinstance(error, LookupError) else "error"


def innermost(trace: TracebackType | None) -> str:
    where = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        where = f"{Path(code.co_filename).name}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    return where


def load(path: str) -> type[Any]:
    module, name = path.rsplit(".", 1)
    cls: type[Any] = getattr(importlib.import_module(module), name)
    return cls


class Conformance:
    def __init__(self) -> None:
        self.report = Path(os.environ["CONFORMANCE_REPORT"])
        self.limit = int(os.environ.get("CONFORMANCE_TEST_TIMEOUT_S", "120"))
        self.labels = Labels(os.environ.get("CONFORMANCE_LABELS", "none"))
        self.recorder = Recorder()
        self.results: dict[str, dict[str, Any]] = {}

        # Before any test module: it makes `Request` the class that carries the label.
        importlib.import_module("vllm_omni")
        if self.labels.mode != "none":
            label_requests(load("vllm_omni.request.OmniRequest"), self.labels)
        self.abort = importlib.import_module("vllm.v1.request").RequestStatus.FINISHED_ABORTED
        sched = "vllm.v1.core.sched"
        self.swap = {
            "Scheduler": os.environ.get("CONFORMANCE_SYNC") or f"{sched}.scheduler.Scheduler",
            "AsyncScheduler": os.environ.get("CONFORMANCE_ASYNC")
            or f"{sched}.async_scheduler.AsyncScheduler",
        }

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        modules = {item.getparent(pytest.Module).obj for item in items}  # type: ignore[union-attr]
        modules.add(importlib.import_module("tests.v1.core.utils"))
        for name, path in self.swap.items():
            cls = watched(load(path), self.recorder)
            for module in modules:
                if hasattr(module, name):
                    setattr(module, name, cls)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self.recorder.reset()
        self.labels.stages.clear()
        # Processor time: a loaded machine, or a slow import in a subprocess, is no endless loop.
        previous = signal.signal(signal.SIGPROF, self._alarm)
        signal.setitimer(signal.ITIMER_PROF, self.limit)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, previous)
            # Here, and not at teardown: what the test has patched must still be in place.
            for scheduler in self.recorder.schedulers:
                drain(scheduler, self.abort, self.recorder)

    @staticmethod
    def _alarm(signum: int, frame: FrameType | None) -> None:
        raise TestTookTooLong

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        report: Any = yield
        if call.when == "call" or report.outcome == "failed":
            result: dict[str, Any] = {"outcome": report.outcome, "seconds": report.duration}
            if call.excinfo is not None and report.outcome == "failed":
                error, trace = call.excinfo.value, call.excinfo.tb
                result |= {
                    "cause": classify(error, trace),
                    "error": f"{type(error).__name__}: {error}".splitlines()[0][:300],
                    "where": innermost(trace),
                }
            result["violations"] = [
                {"kind": v.kind, "detail": v.detail} for v in self.recorder.violations
            ]
            self.results[item.nodeid] = result
        return report  # type: ignore[no-any-return]

    def pytest_sessionfinish(self) -> None:
        self.report.write_text(json.dumps(self.results, indent=1))


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", f"{marker}: of the upstream suite")
    config.pluginmanager.register(Conformance(), "horizonserve-conformance")
