"""Bookkeeping around vLLM's waiting queues: which requests are fresh, and putting views back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.request import RequestStatus

from horizonserve.policy.slack import Ticket
from horizonserve.policy.waiting import Waiting

_WAITING = RequestStatus.WAITING


def is_fresh(request: Any) -> bool:
    """Whether the request waits for its very first step, so that hiding it interrupts nothing.

    A preempted, partly computed or blocked request and a streaming session with history are not.
    """
    return request.status is _WAITING and request.num_computed_tokens == 0


class FreshRequests:
    """The fresh requests of the queues by ticket, kept from step to step.

    Every change that this package makes or sees is followed at once. Others (an abort, a
    preemption) change the number of queued requests or the head of the queue, or turn up as a
    chosen request that is not fresh any more; ``sync`` and the caller then rebuild.
    """

    def __init__(self) -> None:
        self.groups = Waiting()
        self.ahead: list[Any] = []
        self._requests: dict[Ticket, list[Any]] = {}
        self._queued = -1

    def forget(self) -> None:
        """Rebuild at the next ``sync``."""
        self._queued = -1

    def add(self, request: Any) -> None:
        """Follow a request that is being put into a queue."""
        if self._queued < 0:
            return
        ticket: Ticket = request.horizonserve_ticket
        if ticket.group != request.request_id or not is_fresh(request):
            self.forget()  # a companion may belong to a group that already runs
            return
        self._queued += 1
        self._requests[ticket] = [request]
        self.groups.add(ticket)

    def took(self, request: Any) -> None:
        """Follow a request that a step took out of its queue."""
        self._queued -= 1
        ticket = request.horizonserve_ticket
        if (requests := self._requests.get(ticket)) is None:
            self.forget()  # one of ``ahead``
            return
        requests.remove(request)
        if not requests:
            del self._requests[ticket]
            self.groups.remove(ticket)

    def sync(self, waiting: Any, skipped: Any, running: list[Any]) -> None:
        """Make sure that this is what the queues hold."""
        queued = len(waiting) + len(skipped)
        stale = queued != self._queued or skipped or (waiting and not self._heads(waiting))
        if stale:
            self.rebuild(waiting, skipped, running)

    def _heads(self, waiting: Any) -> bool:
        head = waiting.peek_request()
        return is_fresh(head) or head in self.ahead

    def rebuild(self, waiting: Any, skipped: Any, running: list[Any]) -> None:
        """Read the queues anew. O(queued + running)."""
        self.groups = Waiting()
        self._requests = {}
        self._queued = len(waiting) + len(skipped)
        fresh = [request for queue in (skipped, waiting) for request in queue if is_fresh(request)]
        started = {request.horizonserve_ticket for request in running}
        started.update(r.horizonserve_ticket for r in waiting if not is_fresh(r))
        for request in fresh:
            ticket = request.horizonserve_ticket
            if ticket in started:
                continue
            if ticket in self._requests:
                self._requests[ticket].append(request)
            else:
                self._requests[ticket] = [request]
                self.groups.add(ticket)
        # A companion of a group that has started is never kept from it.
        self.ahead = [
            r for r in waiting if not is_fresh(r) or r.horizonserve_ticket not in self._requests
        ]

    def of(self, tickets: Iterable[Ticket]) -> list[Any]:
        """The requests of these groups, in their order."""
        requests = self._requests
        return [request for ticket in tickets for request in requests[ticket]]


def put_back(queue: Any, before: list[Any], view: Any, gone: set[Any] | None) -> list[Any]:
    """Make ``queue`` reflect what a step did to ``view``, which held ``before``.

    What is new in the view was preempted and goes to the front in its order. What left the view
    leaves the queue; after an exception only if it is among ``gone``, the requests known to be
    elsewhere, because a step that broke off may hold a request that it never placed.

    Returns:
        The requests that left the queue.
    """
    after = list(view)
    if after == before:
        return []
    kept, known = set(after), set(before)
    left = [r for r in before if r not in kept and (gone is None or r in gone)]
    if left:
        queue.remove_requests(left)
    for request in reversed([r for r in after if r not in known]):
        queue.prepend_request(request)
    return left
