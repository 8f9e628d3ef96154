"""The rules of the gate, on small fakes; `--self-check` repeats it on real schedulers."""

from __future__ import annotations

from collections import deque
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
from conformance.compare import STATES_BY_LOOKUP, judge
from conformance.invariants import Recorder, drain, watched


class Status(Enum):
    WAITING = 1
    RUNNING = 2
    FINISHED_ABORTED = 3


class Request:
    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.status = Status.WAITING

    def is_finished(self) -> bool:
        return self.status is Status.FINISHED_ABORTED


class Scheduler:
    """One block per running request, one admission per step."""

    def __init__(self, blocks: int = 4) -> None:
        self.requests: dict[str, Any] = {}
        self.waiting: deque[Any] = deque()
        self.skipped_waiting: deque[Any] = deque()
        self.running: list[Any] = []
        self.deferred_frees: list[tuple[int, list[Any]]] = []
        self.owned: dict[str, Any] = {}
        all_blocks = [SimpleNamespace(block_id=i, ref_cnt=0, is_null=i == 0) for i in range(blocks)]
        pool = SimpleNamespace(blocks=all_blocks, num_gpu_blocks=blocks)
        pool.get_num_free_blocks = lambda: sum(b.ref_cnt == 0 for b in all_blocks[1:])
        self.kv_cache_manager = SimpleNamespace(
            block_pool=pool,
            get_block_ids=lambda i: ([self.owned[i].block_id],) if i in self.owned else ([],),
        )

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> None:
        request = self.waiting.popleft()
        request.status = Status.RUNNING
        self.running.append(request)
        block = next(b for b in self.kv_cache_manager.block_pool.blocks[1:] if not b.ref_cnt)
        block.ref_cnt = 1
        self.owned[request.request_id] = block

    def update_from_output(self) -> None:
        self.finish_requests([self.running[0].request_id], Status.FINISHED_ABORTED)

    def reset_prefix_cache(self) -> bool:
        return True

    def finish_requests(self, ids: Any, status: Any) -> None:
        for request_id in list(self.requests if ids is None else ids):
            request = self.requests.pop(request_id)
            request.status = status
            for queue in (self.waiting, self.skipped_waiting, self.running):
                if request in queue:
                    queue.remove(request)
            self.free(request)

    def free(self, request: Any) -> None:
        if block := self.owned.pop(request.request_id, None):
            block.ref_cnt = 0


class LosesInSchedule(Scheduler):
    def schedule(self) -> None:
        super().schedule()
        self.waiting.pop()


class ReplacesQueue(Scheduler):
    def schedule(self) -> None:
        super().schedule()
        self.waiting = deque(self.waiting)


class QueuesTwice(Scheduler):
    def add_request(self, request: Any) -> None:
        super().add_request(request)
        self.skipped_waiting.append(request)


class ForgetsStatus(Scheduler):
    def schedule(self) -> None:
        super().schedule()
        self.running[-1].status = Status.WAITING


class Leaks(Scheduler):
    def free(self, request: Any) -> None:
        self.owned.pop(request.request_id, None)


class MissesAbort(Scheduler):
    def finish_requests(self, ids: Any, status: Any) -> None:
        super().finish_requests([r.request_id for r in self.running], status)


class KeepsGhost(Scheduler):
    def finish_requests(self, ids: Any, status: Any) -> None:
        ghosts = list(self.waiting)
        super().finish_requests(ids, status)
        self.waiting.extend(ghosts)


class Raises(Scheduler):
    def schedule(self) -> None:
        raise LookupError("on purpose")


def violations_of(base: type[Any]) -> set[str]:
    recorder = Recorder()
    scheduler = watched(base, recorder)()
    for name in "abc":
        scheduler.add_request(Request(name))
    try:
        scheduler.schedule()
        scheduler.update_from_output()
        scheduler.schedule()
    except LookupError:
        pass
    drain(scheduler, Status.FINISHED_ABORTED, recorder)
    return {v.kind for v in recorder.violations}


def test_a_correct_scheduler_has_no_violations() -> None:
    assert violations_of(Scheduler) == set()


@pytest.mark.parametrize(
    ("base", "kind"),
    [
        (LosesInSchedule, "lost after schedule"),
        (ReplacesQueue, "waiting replaced by schedule"),
        (QueuesTwice, "duplicate after add_request"),
        (ForgetsStatus, "status after schedule"),
        (Leaks, "leak"),
        (MissesAbort, "immortal"),
        (KeepsGhost, "left-behind"),
        (Raises, "raised LookupError in schedule"),
    ],
)
def test_every_kind_of_wrong_scheduler_is_caught(base: type[Any], kind: str) -> None:
    assert kind in violations_of(base)


def test_a_fenced_block_and_a_block_of_a_transferring_request_are_no_leak() -> None:
    recorder = Recorder()
    scheduler = watched(Scheduler, recorder)()
    for name in "ab":
        scheduler.add_request(Request(name))
        scheduler.schedule()
    scheduler.deferred_frees.append((1, [scheduler.owned.pop("a")]))
    sending = scheduler.requests["b"]
    scheduler.running.clear()
    sending.status = Status.FINISHED_ABORTED
    scheduler.finish_requests(["a"], Status.FINISHED_ABORTED)
    scheduler.finish_requests = lambda ids, status: None
    drain(scheduler, Status.FINISHED_ABORTED, recorder)
    assert not recorder.violations


def test_a_scheduler_made_without_init_is_left_alone() -> None:
    recorder = Recorder()
    cls: Any = watched(Scheduler, recorder)
    scheduler = cls.__new__(cls)
    scheduler.requests, scheduler.waiting = {}, []
    scheduler.add_request(Request("a"))
    assert not recorder.violations and not recorder.schedulers


def result(outcome: str, cause: str = "", *kinds: str) -> dict[str, Any]:
    violations = [{"kind": kind, "detail": ""} for kind in kinds]
    return {"outcome": outcome, "cause": cause, "violations": violations}


STOCK = {"a": result("passed"), "b": result("passed", "", "leak"), "c": result("failed", "error")}


def test_only_what_the_stock_scheduler_passes_counts() -> None:
    ours = {"a": result("passed"), "b": result("passed", "", "leak"), "c": result("failed")}
    assert judge(STOCK, ours, order_matters=True).ok


def test_a_new_failure_and_a_test_that_did_not_run_fail_the_gate() -> None:
    verdict = judge(STOCK, {"a": result("failed", "assertion")}, order_matters=True)
    assert not verdict.ok
    assert [line.split(":")[0] for line in verdict.failures] == ["a", "b"]


@pytest.mark.parametrize(
    ("cause", "ok"), [("assertion", True), ("lookup", False), ("error", False)]
)
def test_mixed_traffic_may_fail_by_the_tests_own_assertion_only(cause: str, ok: bool) -> None:
    verdict = judge(STOCK, STOCK | {"a": result("failed", cause)}, order_matters=False)
    assert verdict.ok is ok


@pytest.mark.parametrize("test", sorted(STATES_BY_LOOKUP))
def test_a_listed_test_may_fail_by_its_own_lookup_in_mixed_traffic(test: str) -> None:
    stock, ours = {test: result("passed")}, {test: result("failed", "lookup")}
    assert judge(stock, ours, order_matters=False).ok
    assert not judge(stock, ours, order_matters=True).ok
    assert not judge(stock, {test: result("failed", "error")}, order_matters=False).ok


def test_only_a_violation_that_the_stock_scheduler_lacks_counts() -> None:
    ours = STOCK | {"a": result("passed", "", "leak")}
    verdict = judge(STOCK, ours, order_matters=False)
    assert verdict.violations == ["a: leak: "]
