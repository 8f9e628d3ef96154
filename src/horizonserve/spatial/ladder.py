"""The SM levels that a die really has, and the few of them that a server uses (HorizonServe 4.4).

The shared stage takes the group of a split, downstream the remainder of the same split: two
separate splits would both start at SM 0 and overlap. Drivers round, and how far groups reach
depends on the die, so a level is known by what was granted, never by what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

MOST_LEVELS: Final = 6


@dataclass(frozen=True, slots=True)
class Die:
    """What the driver says of a device's SMs, as counts."""

    total_sms: int
    #: Least SMs of a partition, and the multiple in which groups are granted.
    minimum_sms: int
    alignment_sms: int

    def __post_init__(self) -> None:
        if not 0 < self.alignment_sms <= self.total_sms or not (
            0 < self.minimum_sms <= self.total_sms
        ):
            raise ValueError(f"no such die: {self}")


class Side(StrEnum):
    """Whose SMs of a level a process takes."""

    SHARED = "shared"
    DOWNSTREAM = "downstream"


class Level(NamedTuple):
    """One split of the device, as granted: the SMs of both sides, which sum to its total."""

    shared_sms: int
    downstream_sms: int
    #: Which SMs these are, as any 64-bit value: equal in two processes that mean the same split.
    fingerprint: int = 0

    @property
    def whole(self) -> bool:
        """Whether it is the primary context, where no side is capped."""
        return self.downstream_sms == 0


def smallest(compute_capability: tuple[int, int]) -> tuple[int, int]:
    """Least partition and alignment in SMs (CUDA Programming Guide, green contexts).

    For drivers before 13.0, which do not report them, and for tables without a driver.

    Raises:
        ValueError: the device is older than green contexts.
    """
    if compute_capability >= (9, 0):
        return 8, 8
    if compute_capability >= (8, 0):
        return 4, 2
    if compute_capability >= (6, 0):
        return 2, 2 if compute_capability >= (7, 0) else 1
    major, minor = compute_capability
    raise ValueError(f"compute capability {major}.{minor}: green contexts need 6.0 or later")


def requests(die: Die) -> range:
    """The SM counts to ask the driver for: every aligned one that leaves both sides a minimum."""
    step = die.alignment_sms
    first = -(-die.minimum_sms // step) * step
    return range(first, die.total_sms - die.minimum_sms + 1, step)


def existing(die: Die, grant: Callable[[int], Level | None]) -> tuple[Level, ...]:
    """The levels of the die without the whole, by rising SMs of the shared stage.

    ``grant`` gives the level for a requested count of SMs, None where it is refused. Only counts
    that are granted as requested are kept, so that a level can be asked for again.

    Raises:
        ValueError: a grant does not add up to the die.
    """
    found = []
    for requested in requests(die):
        level = grant(requested)
        if level is None:
            continue
        shared, downstream, _ = level
        if shared + downstream != die.total_sms:
            raise ValueError(
                f"{requested} SMs asked: granted {shared} and {downstream}, which is not the"
                f" {die.total_sms} SMs of the device"
            )
        if shared == requested and downstream >= die.minimum_sms:
            found.append(level)
    return tuple(found)


def aligned(die: Die) -> Callable[[int], Level | None]:
    """The grants of a die whose groups reach every aligned count; real dies may stop earlier."""

    def grant(requested: int) -> Level | None:
        step = die.alignment_sms
        shared = -(-max(requested, die.minimum_sms) // step) * step
        return Level(shared, die.total_sms - shared) if shared <= die.total_sms else None

    return grant


def choose(
    die: Die,
    levels: Iterable[Level],
    s_min_sms: int | None = None,
    s_cap_sms: int | None = None,
    most: int = MOST_LEVELS,
) -> tuple[Level, ...]:
    """At most ``most`` rungs, evenly spread over [S_min, S_cap], and the whole as the last.

    Multiples of the alignment are taken where there are any. Without bounds they are a quarter and
    0.6 of the device, around the half at which decode saturates (HorizonServe 3.3: 64 to 80 of 142
    SMs). Where no level lies within them, only the whole is left.

    Raises:
        ValueError: the bounds are crossed, or ``most`` leaves no room for a rung.
    """
    low = int(die.total_sms * 0.25) if s_min_sms is None else s_min_sms
    high = int(die.total_sms * 0.6) if s_cap_sms is None else s_cap_sms
    if low > high or most < 2:
        raise ValueError(
            f"s_min_sms={low}, s_cap_sms={high} of {die.total_sms} SMs in {most} levels: no such"
            " ladder; give both, the first at most the second"
        )
    within = sorted(
        (level for level in levels if not level.whole and low <= level.shared_sms <= high),
        key=lambda level: level.shared_sms,
    )
    multiples = [level for level in within if level.shared_sms % die.alignment_sms == 0]
    rungs = _spread(multiples or within, most - 1)
    return (*rungs, Level(die.total_sms, 0))


def _spread(levels: list[Level], count: int) -> list[Level]:
    """``count`` of the sorted levels with both ends, as even in SMs as they allow."""
    if len(levels) <= count:
        return levels
    if count == 1:
        return levels[:1]
    first, last = levels[0].shared_sms, levels[-1].shared_sms
    chosen: list[Level] = []
    start = 0
    for index in range(count):
        target = first + (last - first) * index / (count - 1)
        # Leaves enough levels above for the rungs still to come.
        room = levels[start : len(levels) - (count - 1 - index)]
        best = min(range(len(room)), key=lambda at: abs(room[at].shared_sms - target))
        chosen.append(room[best])
        start += best + 1
    return chosen
