"""Which waiting requests the base scheduler sees in this step, and in what order.

The waiting groups of each path fall into three kinds, each in deadline order:

- *protected*: little slack left, still winnable (slack.py);
- *ordinary*: everything else before its deadline;
- *lost*: past its deadline. Served last, but never starved: of ``LOST_SHARE`` openings that
  others take while lost requests wait, the next one goes to the first of them.

The view is: protected, then ordinary, then lost. Hidden are

- ordinary prefills of the path whose phase it is not (rotation.py);
- ordinary and lost long prefills beyond the long-path cap, while short traffic exists.

Nothing is hidden when that would leave the stage idle, and the first waiting group of a path is
not hidden for longer than ``max_hide_s``; those behind it wait for it, not for the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from horizonserve.policy.rotation import Rotation
from horizonserve.policy.slack import Ticket
from horizonserve.slo import Path

LOST_SHARE: Final = 10

_deadline = attrgetter("deadline_s")


@dataclass(frozen=True, slots=True)
class Rules:
    """The switches of the temporal policy; see config.Settings for their meaning."""

    rotation: bool = True
    slack_guard: bool = True
    u_guard: float = 2.0
    demote_lost: bool = True
    #: Most ordinary long groups in the shared stage; None switches the cap off.
    long_cap: int | None = 2
    max_hide_s: float = 5.0


@dataclass(frozen=True, slots=True)
class View:
    """Visible groups in the order in which they should be admitted, and how many are not."""

    order: list[Ticket]
    hidden: int
    protected: int
    lost: int


@dataclass(slots=True)
class _Kinds:
    protected: list[Ticket] = field(default_factory=list)
    ordinary: list[Ticket] = field(default_factory=list)
    lost: list[Ticket] = field(default_factory=list)


@dataclass(slots=True)
class TemporalPolicy:
    """HorizonServe's temporal scheduler (Algorithm 1, step 2) with the bounds of the module text."""

    rules: Rules = field(default_factory=Rules)
    rotation: Rotation = field(default_factory=Rotation)
    _lost_waits: int = 0
    _short_seen_s: float = float("-inf")
    _hidden_since_s: dict[Path, float | None] = field(
        default_factory=lambda: {Path.SHORT: None, Path.LONG: None}
    )

    def saw_short(self, now_s: float) -> None:
        """Note that short traffic exists: the cap keeps slots for it."""
        self._short_seen_s = now_s

    def view(
        self,
        waiting: Sequence[Ticket],
        now_s: float,
        long_in_stage: int = 0,
        busy: bool = True,
    ) -> View:
        """The view of a step in which a slot is free.

        Args:
            waiting: groups that wait for their first step, in any order.
            now_s: time on the clock of the tickets' deadlines.
            long_in_stage: long groups that hold a place in the shared stage.
            busy: whether the stage has other work in this step; if not, nothing is hidden.
        """
        short = [t for t in waiting if t.path is Path.SHORT]
        if len(short) == len(waiting):
            long: list[Ticket] = []
        else:
            long = [t for t in waiting if t.path is Path.LONG]
        if short:
            self._short_seen_s = now_s
        shorts, longs = self._kinds(short, now_s), self._kinds(long, now_s)

        room = self._long_room(longs, now_s, long_in_stage)
        ordinary_long = longs.ordinary[:room]
        lost_long = longs.lost[: room - len(ordinary_long)]
        ordinary_short = shorts.ordinary
        if self.rules.rotation and ordinary_short and ordinary_long:
            phase = self.rotation.phase(len(shorts.protected) / len(short))
            self.rotation.advance()
            if phase is Path.SHORT and not self._overdue(Path.LONG, now_s):
                ordinary_long = []
            elif phase is Path.LONG and not self._overdue(Path.SHORT, now_s):
                ordinary_short = []

        protected = _merged(shorts.protected, longs.protected)
        lost = _merged(shorts.lost, lost_long)
        order = [*protected, *_merged(ordinary_short, ordinary_long), *lost]
        if not order and not busy:
            order = _merged(short, long)
        elif lost and len(order) > len(lost):
            self._lost_waits += 1
            if self._lost_waits > LOST_SHARE:
                self._lost_waits = 0
                order.remove(lost[0])
                order.insert(0, lost[0])
        self._note_hidden(Path.SHORT, bool(shorts.ordinary) and not ordinary_short, now_s)
        self._note_hidden(
            Path.LONG,
            bool(longs.ordinary or longs.lost) and not (ordinary_long or lost_long),
            now_s,
        )
        return View(
            order=order,
            hidden=len(waiting) - len(order),
            protected=len(protected),
            lost=len(shorts.lost) + len(longs.lost),
        )

    def _kinds(self, tickets: list[Ticket], now_s: float) -> _Kinds:
        kinds = _Kinds()
        if not tickets:
            return kinds
        rules = self.rules
        u_guard = rules.u_guard if rules.slack_guard else float("-inf")
        for ticket in sorted(tickets, key=_deadline):
            left_s = ticket.deadline_s - now_s
            if left_s < 0 and rules.demote_lost:
                kinds.lost.append(ticket)
            elif left_s < u_guard * ticket.estimate_s:
                kinds.protected.append(ticket)
            else:
                kinds.ordinary.append(ticket)
        return kinds

    def _long_room(self, longs: _Kinds, now_s: float, long_in_stage: int) -> int:
        """How many ordinary or lost long groups may be seen."""
        everything = len(longs.ordinary) + len(longs.lost)
        cap = self.rules.long_cap
        if cap is None or now_s - self._short_seen_s > self.rules.max_hide_s:
            return everything
        room = max(0, cap - long_in_stage)
        return max(room, 1) if self._overdue(Path.LONG, now_s) else room

    def _overdue(self, path: Path, now_s: float) -> bool:
        since_s = self._hidden_since_s[path]
        return since_s is not None and now_s - since_s >= self.rules.max_hide_s

    def _note_hidden(self, path: Path, hidden: bool, now_s: float) -> None:
        if not hidden:
            self._hidden_since_s[path] = None
        elif self._hidden_since_s[path] is None:
            self._hidden_since_s[path] = now_s


def _merged(left: list[Ticket], right: list[Ticket]) -> list[Ticket]:
    if not left:
        return right
    if not right:
        return left
    return sorted(left + right, key=_deadline)
