"""The waiting groups, kept in deadline order so that a step looks at few of them.

Groups with the same path and the same estimate share a line. Within a line the deadline decides
both who is lost and who is protected, so each kind is one run of the line, found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from horizonserve.policy.slack import Ticket
from horizonserve.slo import Path

_deadline = attrgetter("deadline_s")


class Runs:
    """Some of the waiting groups: runs [start, stop) of lines."""

    __slots__ = ("runs", "size")

    def __init__(self) -> None:
        self.runs: list[tuple[list[Ticket], int, int]] = []
        self.size = 0

    def add(self, line: list[Ticket], start: int, stop: int) -> None:
        self.runs.append((line, start, stop))
        self.size += stop - start

    def first(self, limit: int) -> list[Ticket]:
        """The first ``limit`` groups by deadline; equal deadlines keep their line's order."""
        if limit <= 0 or not self.size:
            return []
        if len(self.runs) == 1:
            line, start, stop = self.runs[0]
            return line[start : min(stop, start + limit)]
        head: list[Ticket] = []
        for line, start, stop in self.runs:
            head += line[start : min(stop, start + limit)]
        head.sort(key=_deadline)
        return head[:limit]


class Kinds(NamedTuple):
    """The waiting groups of one path by what the slack says of them (policy/view.py)."""

    protected: Runs
    ordinary: Runs
    lost: Runs
    size: int


class _Line:
    """Groups of one path and one estimate, by deadline."""

    __slots__ = ("deadlines_s", "tickets")

    def __init__(self) -> None:
        self.deadlines_s: list[float] = []
        self.tickets: list[Ticket] = []

    def add(self, ticket: Ticket) -> None:
        at = bisect_right(self.deadlines_s, ticket.deadline_s)
        self.deadlines_s.insert(at, ticket.deadline_s)
        self.tickets.insert(at, ticket)

    def remove(self, ticket: Ticket) -> None:
        at = self.tickets.index(ticket, bisect_left(self.deadlines_s, ticket.deadline_s))
        del self.deadlines_s[at], self.tickets[at]


class Waiting:
    """The groups that wait for their first step."""

    def __init__(self, tickets: Iterable[Ticket] = ()) -> None:
        self._lines: dict[tuple[Path, float], _Line] = {}
        for ticket in tickets:
            self.add(ticket)

    def __len__(self) -> int:
        return sum(len(line.tickets) for line in self._lines.values())

    def add(self, ticket: Ticket) -> None:
        key = ticket.path, ticket.estimate_s
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line()
        line.add(ticket)

    def remove(self, ticket: Ticket) -> None:
        """Raises ValueError or KeyError when the group does not wait."""
        key = ticket.path, ticket.estimate_s
        line = self._lines[key]
        line.remove(ticket)
        if not line.tickets:
            del self._lines[key]

    def everything(self) -> Runs:
        runs = Runs()
        for line in self._lines.values():
            runs.add(line.tickets, 0, len(line.tickets))
        return runs

    def at(self, time_s: float) -> tuple[Runs, Runs]:
        """Those whose deadline is then ahead, and those whose it is not."""
        ahead, passed = Runs(), Runs()
        for line in self._lines.values():
            late = bisect_left(line.deadlines_s, time_s)
            if late:
                passed.add(line.tickets, 0, late)
            if late < len(line.tickets):
                ahead.add(line.tickets, late, len(line.tickets))
        return ahead, passed

    def kinds(self, path: Path, now_s: float, u_guard: float, u_lost: float) -> Kinds:
        """Split a path's groups by their slack ratio; minus infinity means nobody."""
        protected, ordinary, lost = Runs(), Runs(), Runs()
        size = 0
        for (line_path, estimate_s), line in self._lines.items():
            if line_path is not path:
                continue
            deadlines_s, tickets = line.deadlines_s, line.tickets
            # (d - t) / r < u, that is d < t + u r
            given_up = bisect_left(deadlines_s, now_s + u_lost * estimate_s)
            guarded = bisect_left(deadlines_s, now_s + u_guard * estimate_s, given_up)
            end = len(tickets)
            size += end
            if given_up:
                lost.add(tickets, 0, given_up)
            if given_up < guarded:
                protected.add(tickets, given_up, guarded)
            if guarded < end:
                ordinary.add(tickets, guarded, end)
        return Kinds(protected, ordinary, lost, size)
