"""Bookkeeping around vLLM's waiting queues: which requests are fresh, and putting views back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import RequestStatus

from horizonserve.policy.slack import Ticket
from horizonserve.policy.waiting import Waiting

_WAITING = RequestStatus.WAITING


def is_fresh(request: Any) -> bool:
    """Whether the request waits for its group's very first step, so that hiding it is harmless.

    A preempted, partly computed or blocked request, a streaming session with history and a
    companion of a request that has started are not.
    """
    return (
        request.status is _WAITING
        and request.num_computed_tokens == 0
        and not request.horizonserve_ticket.started
    )


class FreshRequests:
    """The fresh requests of the queues by ticket, kept from step to step while nothing else moves.

    The index is for exactly the ``waiting`` queue that it remembers. Whatever changed that queue
    behind its back (an abort, a preemption, a session that resumes) shows in a comparison, which
    costs a microsecond or two, and makes it read the queues anew.
    """

    def __init__(self, admit: Callable[[Any], object]) -> None:
        """``admit`` gives a ticket to a request that entered some other way than by ``add``."""
        self._admit = admit
        self.groups = Waiting()
        #: Requests of ``waiting`` that are not fresh, in their order.
        self.ahead: list[Any] = []
        self._requests: dict[Ticket, list[Any]] = {}
        #: What ``waiting`` held, in its order; a dictionary, for what is taken out of the middle.
        self._seen: dict[Any, None] | None = None

    @property
    def tickets(self) -> list[Ticket]:
        """The groups in the order of the queue, after ``sync``."""
        return list(self._requests)

    def forget(self) -> None:
        """Read the queues anew at the next ``sync``."""
        self._seen = None

    def add(self, request: Any) -> None:
        """Follow a request that is about to be appended to ``waiting``."""
        if self._seen is None:
            return
        ticket: Ticket = request.horizonserve_ticket
        if ticket in self._requests or not is_fresh(request):
            self.forget()
            return
        self._seen[request] = None
        self._requests[ticket] = [request]
        self.groups.add(ticket)

    def remove(self, waiting: Any, requests: list[Any]) -> None:
        """Take these requests out of ``waiting``, which is as it was at ``sync``."""
        if self._seen is None:
            waiting.remove_requests(requests)
            return
        for request in requests:
            del self._seen[request]
        # To search the queue for them would cost as much as all the rest of a step's view.
        waiting.clear()
        waiting.extend(self._seen)

    def took(self, requests: list[Any]) -> None:
        """Follow a step that took these requests out of the queues."""
        for request in requests:
            ticket = request.horizonserve_ticket
            if self._requests.pop(ticket, None) == [request]:
                self.groups.remove(ticket)
            else:
                self.forget()  # one of ``ahead``, or a group of which a member is left

    def sync(self, waiting: Any, skipped: Any, running: list[Any]) -> None:
        """Make sure that this is what the queues hold."""
        # A heap has no order that could be compared, and blocked requests are rare.
        followed = isinstance(waiting, FCFSRequestQueue) and not skipped
        if not followed or self._seen is None or list(waiting) != list(self._seen):
            self._rebuild(waiting, skipped, running)
        if not followed:
            self.forget()

    def _rebuild(self, waiting: Any, skipped: Any, running: list[Any]) -> None:
        for request in (*running, *skipped, *waiting):
            if not hasattr(request, "horizonserve_ticket"):
                self._admit(request)
        for request in running:
            # Under the stock policy nobody marked what started.
            request.horizonserve_ticket.started = True
        self._seen = dict.fromkeys(waiting)
        self._requests = {}
        self.groups = Waiting()
        for request in (*skipped, *self._seen):
            ticket = request.horizonserve_ticket
            if not is_fresh(request):
                continue
            if ticket in self._requests:
                self._requests[ticket].append(request)
            else:
                self._requests[ticket] = [request]
                self.groups.add(ticket)
        self.ahead = [request for request in self._seen if not is_fresh(request)]

    def of(self, tickets: Iterable[Ticket]) -> list[Any]:
        """The requests of these groups, in their order."""
        requests = self._requests
        return [request for ticket in tickets for request in requests[ticket]]


def put_back(
    queue: Any,
    before: list[Any],
    view: Any,
    gone: set[Any] | None,
    remove: Callable[[list[Any]], None],
) -> list[Any]:
    """Make ``queue`` reflect what a step did to ``view``, which held ``before``.

    What is new in the view was preempted and goes to the front in its order. What left the view
    leaves the queue; after an exception only if it is among ``gone``, the requests known to be
    elsewhere, because a step that broke off may hold a request that it never placed. ``remove``
    takes requests out of the queue.

    Returns:
        The requests that left the queue.
    """
    after = list(view)
    if after == before:
        return []
    kept, known = set(after), set(before)
    left = [r for r in before if r not in kept and (gone is None or r in gone)]
    if left:
        remove(left)
    for request in reversed([r for r in after if r not in known]):
        queue.prepend_request(request)
    return left
