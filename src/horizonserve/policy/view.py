"""Which waiting groups the base scheduler sees in this step, and in what order.

The waiting groups of each path are of three kinds:

- *lost*: the deadline has passed, or is too near for the estimate (u < u_lost). Served last but
  never starved: after ``LOST_SHARE`` openings that others were offered while lost groups waited,
  the next is offered to the first of them.
- *protected*: little slack left but still winnable (u < u_guard). Exempt from all hiding.
- *ordinary*: everything else.

The view is the protected and the visible ordinary groups by deadline, then the lost ones by
deadline. Hidden are

- ordinary prefills of the path whose phase it is not (rotation.py);
- ordinary and lost long prefills beyond the long-path cap, while short traffic exists.

Nothing is hidden when that would leave the stage idle, and the first waiting group of a path is
not hidden for longer than ``max_hide_s``: from then on it is seen until it, or another of its path,
has entered. Those behind it wait for it, not for the policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple

from horizonserve.policy.rotation import Rotation
from horizonserve.policy.slack import Ticket
from horizonserve.policy.waiting import Kinds, Waiting
from horizonserve.slo import Path

LOST_SHARE: Final = 10

_NOBODY: Final = float("-inf")


@dataclass(frozen=True, slots=True)
class Rules:
    """The switches of the temporal policy; see config.Settings for their meaning."""

    rotation: bool = True
    slack_guard: bool = True
    u_guard: float = 4.0
    #: Below it a group is lost; None: nobody is, and a passed deadline stays protected.
    u_lost: float | None = 0.5
    #: Most long groups in the shared stage before ordinary ones are held; None: no cap.
    long_cap: int | None = 2
    max_hide_s: float = 5.0


class View(NamedTuple):
    """Visible groups in the order in which to admit them, and how many there are of each sort."""

    order: list[Ticket]
    hidden: int
    protected: int
    lost: int


class TemporalPolicy:
    """HorizonServe's temporal scheduler: Algorithm 1, step 2, with the bounds above."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.rotation = Rotation()
        self._lost_passed_over = 0
        self._short_seen_s = float("-inf")
        self._hidden_since_s: dict[Path, float | None] = dict.fromkeys(Path)

    def saw_short(self, now_s: float) -> None:
        """Note that short traffic exists: the cap keeps slots for it."""
        self._short_seen_s = now_s

    def entered(self, path: Path) -> None:
        """Note that a group of this path has entered the stage."""
        self._hidden_since_s[path] = None

    def view(
        self, waiting: Waiting, now_s: float, limit: int, long_in_stage: int, busy: bool
    ) -> View:
        """The view of a step in which ``limit`` > 0 slots are free.

        Args:
            waiting: groups that wait for their first step.
            now_s: time on the clock of the deadlines.
            limit: groups that the step can admit; the view names no more than that.
            long_in_stage: long groups that hold a place in the shared stage.
            busy: whether the stage has other work in this step; if not, nothing is hidden.
        """
        rules = self.rules
        u_guard = rules.u_guard if rules.slack_guard else _NOBODY
        u_lost = _NOBODY if rules.u_lost is None else rules.u_lost
        short = waiting.kinds(Path.SHORT, now_s, u_guard, u_lost)
        long = waiting.kinds(Path.LONG, now_s, u_guard, u_lost)
        if short.size:
            self._short_seen_s = now_s

        room = self._long_room(long, now_s, long_in_stage)
        shorts, longs = self._phase(short, long, room, now_s)
        order = _merged(short.protected.first(limit), long.protected.first(limit))
        order = _merged(order, short.ordinary.first(min(limit, shorts)))
        order = _merged(order, long.ordinary.first(min(limit, longs)))[:limit]
        lost_room = room - min(room, long.ordinary.size)
        lost = _merged(short.lost.first(limit), long.lost.first(lost_room))
        if order and (first := self._share_for_lost(short, long)) is not None:
            order.insert(0, first)
            lost = [ticket for ticket in lost if ticket is not first]
        order = (order + lost)[:limit]
        if not order and not busy:
            order = waiting.everything().first(limit)

        hidden = short.ordinary.size - shorts
        hidden_long = long.ordinary.size - longs + max(0, long.lost.size - lost_room)
        self._note_hidden(short, Path.SHORT, hidden > 0 and not shorts, now_s)
        self._note_hidden(long, Path.LONG, hidden_long > 0 and not longs and not lost_room, now_s)
        return View(
            order=order,
            hidden=hidden + hidden_long,
            protected=short.protected.size + long.protected.size,
            lost=short.lost.size + long.lost.size,
        )

    def _share_for_lost(self, short: Kinds, long: Kinds) -> Ticket | None:
        """The first lost group when its share is due; neither phase nor cap applies to it."""
        if not (short.lost.size or long.lost.size):
            return None
        self._lost_passed_over += 1
        if self._lost_passed_over <= LOST_SHARE:
            return None
        self._lost_passed_over = 0
        return _merged(short.lost.first(1), long.lost.first(1))[0]

    def _phase(self, short: Kinds, long: Kinds, room: int, now_s: float) -> tuple[int, int]:
        """How many ordinary short and long groups may be seen in this step."""
        shorts, longs = short.ordinary.size, min(room, long.ordinary.size)
        if not (self.rules.rotation and shorts and longs):
            return shorts, longs
        phase = self.rotation.phase(short.protected.size / short.size)
        self.rotation.advance()
        if phase is Path.SHORT and not self._overdue(Path.LONG, now_s):
            return shorts, 0
        if phase is Path.LONG and not self._overdue(Path.SHORT, now_s):
            return 0, longs
        return shorts, longs

    def _long_room(self, long: Kinds, now_s: float, long_in_stage: int) -> int:
        """How many ordinary or lost long groups the cap leaves room for."""
        cap = self.rules.long_cap
        if cap is None or now_s - self._short_seen_s > self.rules.max_hide_s:
            return long.size
        return max(cap - long_in_stage, 1 if self._overdue(Path.LONG, now_s) else 0)

    def _overdue(self, path: Path, now_s: float) -> bool:
        since_s = self._hidden_since_s[path]
        return since_s is not None and now_s - since_s >= self.rules.max_hide_s

    def _note_hidden(self, kinds: Kinds, path: Path, hidden: bool, now_s: float) -> None:
        if not hidden:
            # To be seen is not to enter: another may have taken the slot.
            if not (kinds.ordinary.size + kinds.lost.size and self._overdue(path, now_s)):
                self._hidden_since_s[path] = None
        elif self._hidden_since_s[path] is None:
            self._hidden_since_s[path] = now_s


def _merged(left: list[Ticket], right: list[Ticket]) -> list[Ticket]:
    """Two lists in deadline order as one; on a tie the left goes first."""
    if not left or not right:
        return left or right
    return sorted(left + right, key=attrgetter("deadline_s"))
