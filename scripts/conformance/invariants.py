"""What must hold for a scheduler whatever the order in which it serves requests.

Everything here is duck-typed on the attributes of vLLM's Scheduler, so that the rules are tested
without vLLM. A check returns violations instead of raising: the same rule is also evaluated on the
stock scheduler, and only what the stock scheduler does not do too counts against ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

WATCHED = ("add_request", "schedule", "update_from_output", "finish_requests", "reset_prefix_cache")
QUEUES = ("waiting", "skipped_waiting", "running")


@dataclass(frozen=True)
class Violation:
    """`kind` is stable across runs and is compared with the stock run; `detail` is for people."""

    kind: str
    detail: str = ""


@dataclass
class Recorder:
    """Collects the schedulers and the violations of one test."""

    schedulers: list[Any] = field(default_factory=list)
    violations: dict[Violation, None] = field(default_factory=dict)

    def add(self, found: Iterable[Violation]) -> None:
        self.violations.update(dict.fromkeys(found))

    def reset(self) -> None:
        self.schedulers.clear()
        self.violations.clear()


def check_queues(scheduler: Any) -> Iterator[Violation]:
    """Every unfinished request is queued exactly once, and nothing else is queued."""
    queued = {name: list(getattr(scheduler, name)) for name in QUEUES}
    count = Counter(r.request_id for queue in queued.values() for r in queue)
    for request_id, times in count.items():
        if times > 1:
            where = [n for n, q in queued.items() for r in q if r.request_id == request_id]
            yield Violation("duplicate", f"{request_id} in {', '.join(where)}")
    for request_id, request in scheduler.requests.items():
        # A finished request may stay known while a connector still sends its blocks.
        if request_id not in count and not request.is_finished():
            yield Violation("lost", f"{request_id} ({request.status.name}) is in no queue")
    for name, queue in queued.items():
        for request in queue:
            if request.request_id not in scheduler.requests and not request.is_finished():
                yield Violation("unknown", f"{request.request_id} in {name} is not a request")
            running = request.status.name == "RUNNING"
            if running != (name == "running") and not request.is_finished():
                yield Violation("status", f"{request.request_id} {request.status.name} in {name}")


def check_blocks(scheduler: Any) -> Iterator[Violation]:
    """With every request finished, only fenced or still-transferring blocks are out of the pool."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    in_use = {b.block_id for b in pool.blocks if b.ref_cnt > 0 and not b.is_null}
    # The null block is never counted as free.
    expected = pool.num_gpu_blocks - 1 - len(in_use)
    if pool.get_num_free_blocks() != expected:
        yield Violation("free-count", f"{pool.get_num_free_blocks()} free, expected {expected}")
    held = {b.block_id for _, blocks in scheduler.deferred_frees for b in blocks}
    for request_id in scheduler.requests:
        held.update(i for group in manager.get_block_ids(request_id) for i in group)
    if leaked := in_use - held:
        yield Violation("leak", f"{len(leaked)} blocks belong to no request: {sorted(leaked)[:8]}")


def check_drained(scheduler: Any) -> Iterator[Violation]:
    """After everything was finished from outside: no request left in a queue, no block lost."""
    for name in QUEUES:
        for request in getattr(scheduler, name):
            yield Violation("left-behind", f"{request.request_id} in {name}")
    for request_id, request in scheduler.requests.items():
        if not request.is_finished():
            yield Violation("immortal", f"{request_id} ({request.status.name}) was not finished")
    yield from check_blocks(scheduler)


def drain(scheduler: Any, abort: Any, recorder: Recorder) -> None:
    """Finish whatever the test left unfinished and look at what remains."""
    try:
        scheduler.finish_requests(None, abort)
        found = list(check_drained(scheduler))
    except Exception as error:  # a test may have replaced parts by mocks; the stock run tells
        found = [Violation("drain-raised", f"{type(error).__name__}: {error}")]
    recorder.add(found)


def watched(base: type[Any], recorder: Recorder) -> type[Any]:
    """A subclass of `base` that checks the invariants after every outermost watched call."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        # From here on it is watched. Tests also build schedulers by __new__, with a few attributes
        # set by hand; there is nothing to check in those.
        self._conformance_depth = 0
        recorder.schedulers.append(self)

    members: dict[str, Any] = {"__init__": init, "__module__": base.__module__}
    members |= {name: _watch(base, name, recorder) for name in WATCHED}
    return type(base.__name__, (base,), members)


@contextmanager
def _nested(scheduler: Any) -> Iterator[bool]:
    """Yields whether this call is to be checked: the outermost one, on a complete scheduler."""
    depth = getattr(scheduler, "_conformance_depth", 1)
    scheduler._conformance_depth = depth + 1
    try:
        yield depth == 0
    finally:
        scheduler._conformance_depth = depth


def _watch(base: type[Any], name: str, recorder: Recorder) -> Callable[..., Any]:
    original = getattr(base, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _nested(self) as checked:
            if not checked:
                return original(self, *args, **kwargs)
            before = self.waiting, self.skipped_waiting
            try:
                return original(self, *args, **kwargs)
            except Exception as error:
                recorder.add([Violation(f"raised {type(error).__name__} in {name}", str(error))])
                raise
            finally:
                recorder.add(_after(self, name, before))

    return method


def _after(scheduler: Any, name: str, before: tuple[Any, Any]) -> list[Violation]:
    found = [Violation(f"{v.kind} after {name}", v.detail) for v in check_queues(scheduler)]
    # Other components keep references to the queues: the objects themselves must survive a step.
    for queue, old in zip(("waiting", "skipped_waiting"), before, strict=True):
        if getattr(scheduler, queue) is not old:
            found.append(Violation(f"{queue} replaced by {name}"))
    return found
