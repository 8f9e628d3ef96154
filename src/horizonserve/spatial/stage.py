"""What a stage process does around each of its forwards: the live loop (HorizonServe 4.4).

    shared stage   pressure, activity downstream -> level -> publish -> cap -> forward -> publish
    downstream     level published, activity of the shared stage -> publish -> cap -> forward -> ...

Levels change between forwards only, so while one stage has moved and another is still in a forward,
the two overlap by the difference of their levels. The epoch in the record tells such a time.

Both sides start from what they do not know yet. The shared stage has all SMs while nothing runs
downstream. A downstream stage that starts then must not have all of them too: an image is one
forward of many seconds. It takes the remainder of S_cap, which is disjoint from every rung, and all
SMs only where the shared stage is idle as well.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Final

from horizonserve.config import Settings
from horizonserve.spatial.backend import Backend
from horizonserve.spatial.controller import Controller, Rules
from horizonserve.spatial.monitor import MAX_STAGES, SHARED_STAGE, Monitor, State

logger = logging.getLogger(f"vllm.{__name__}")

#: A stage that is in one forward for longer counts as hung: longer than any image takes.
SILENCE_S: Final = 600.0
#: A stage counts as active for so long after a forward: on a GPU a forward returns when it is
#: launched, and its next step comes once the result is there.
LINGER_S: Final = 0.1
#: Between two looks at what rarely changes: which stages there are, and whether one objects.
LOOK_S: Final = 1.0


class Stage:
    """The loop of one stage process. One thread uses it: the one that launches the forwards.

    Raises:
        MonitorError: another process is this stage.
        ValueError: there is no level to cap to.
    """

    def __init__(
        self,
        index: int,
        backend: Backend,
        monitor: Monitor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Claim the stage's place in the record.

        Args:
            index: of the stage in its pipeline.
            backend: what caps this process.
            monitor: the server's record; closed together with the stage.
            clock: the one that the record's times are on.
        """
        if len(backend.levels) < 2:
            raise ValueError(
                "no level lies within s_min_sms and s_cap_sms on this device; see `horizonserve"
                " ladder` for those that exist"
            )
        self.index = index
        self.levels = backend.levels
        #: Why it is not capped any more, once that is so.
        self.refused: str | None = None
        self.clock = clock
        self.backend = backend
        self._monitor = monitor
        self._slot = monitor.claim(index, self.levels)
        self._whole = len(self.levels) - 1
        #: The level in use, and the one that was decided on or asked for, if there is one.
        self._level = self._whole
        self._requested: int | None = None
        self._epoch = 0
        self._looked_s = float("-inf")
        #: What the level was chosen by; only the shared stage knows.
        self._last_pressure: float | None = None

    def forward(self, work: bool = True) -> AbstractContextManager[None]:
        """Run a forward at the level of the moment.

        A step without ``work`` (scheduled tokens) says nothing about activity and runs uncapped.
        """
        return _Forward(self) if work else nullcontext()

    def again(self) -> AbstractContextManager[None]:
        """Run what belongs to the last forward, at its level: sampling."""
        return _Forward(self, new=False)

    def begin(self, new: bool) -> AbstractContextManager[None]:
        """Choose and publish the level of a forward if it is a new one; what caps it."""
        now_s = self.clock()
        if new:
            if now_s - self._looked_s >= LOOK_S:
                self._looked_s = now_s
                self._look(now_s)
            if not self.refused:
                self._requested, self._level = self._choose(now_s)
        # Sampling, too, may wait for all that the forward has launched.
        self._slot.publish(self._state(now_s, None), now_s)
        try:
            cap = self.backend.activate(self.levels[self._level])
            cap.__enter__()
        # A cap is no reason to lose a request: whatever it was, the forward runs without.
        except Exception as error:
            self.refuse(f"stage {self.index}: {error}")
            return nullcontext()
        return cap

    def end(self) -> None:
        """Publish that the forward was launched."""
        now_s = self.clock()
        self._slot.publish(self._state(now_s, now_s), now_s)

    def refuse(self, reason: str) -> None:
        """Run uncapped from now on, in every process of the server; says so once."""
        if self.refused is None:
            logger.warning("HorizonServe: spatial control stops, temporal goes on: %s", reason)
            self._monitor.veto(reason)
            self._stop(reason)

    def _stop(self, reason: str) -> None:
        self.refused = reason
        self._requested, self._level = None, self._whole

    def close(self) -> None:
        """Give back the stage's place in the record."""
        self._slot.close()
        self._monitor.close()

    def _look(self, now_s: float) -> None:
        # The process that objected has said so.
        if self.refused is None and (reason := self._monitor.vetoed()) is not None:
            self._stop(reason)

    def _choose(self, now_s: float) -> tuple[int | None, int]:
        """The level decided on, None if there is none, and the one to use."""
        raise NotImplementedError

    def _state(self, now_s: float, last_forward_s: float | None) -> State:
        pressure = self._last_pressure
        return State(
            last_forward_s is None,
            last_forward_s,
            self._requested,
            self._level,
            self._epoch,
            pressure,
            None if pressure is None else now_s,
        )


class SharedStage(Stage):
    """Decides the level, for all."""

    def __init__(
        self,
        backend: Backend,
        monitor: Monitor,
        pressure: Callable[[float], float | None],
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Claim the shared stage's place in the record.

        Args:
            backend: what caps this process.
            monitor: the server's record; closed together with the stage.
            pressure: smoothed memory pressure at a time, None where it is unknown.
            settings: which of the controller's rules apply; see `use`.
            clock: the one that the record's times are on.
        """
        super().__init__(SHARED_STAGE, backend, monitor, clock)
        self._pressure = pressure
        self._by_sms = {level.shared_sms: index for index, level in enumerate(self.levels)}
        self._downstream: list[int] = []
        self._rules: Rules | None = None
        #: Whether a stage downstream had work at the last forward.
        self.co_runs = False
        self.use(settings)

    def use(self, settings: Settings) -> None:
        """Apply settings from the next forward on. The ladder stays as it was made."""
        *rungs, whole = (level.shared_sms for level in self.levels)
        rules = Rules(
            rungs_sms=tuple(rungs),
            aggregate_sms=whole,
            saturation=settings.b_sat,
            step=settings.rung_step,
            min_dwell_s=settings.min_dwell_s,
        )
        if rules != self._rules:
            self._rules, self._controller = rules, Controller(rules)
        self._on = settings.caps
        self._fixed = None if settings.fixed_sms is None else self._by_sms.get(settings.fixed_sms)

    def _look(self, now_s: float) -> None:
        super()._look(now_s)
        others = [stage for stage in range(MAX_STAGES) if stage != self.index]
        self._downstream = [stage for stage in others if self._monitor.read(stage) is not None]
        if self.refused is None and (stages := self._monitor.disagreeing(self.levels)):
            self.refuse(
                f"stage {stages[0]} has another split than stage {self.index}: not the same GPU,"
                " cores or limits"
            )

    def _choose(self, now_s: float) -> tuple[int | None, int]:
        self._last_pressure = pressure = self._pressure(now_s)
        if not self._on:
            self.co_runs = False
            return None, self._whole
        level = self._level
        active = self._active(now_s)
        self.co_runs = bool(active)
        if self._fixed is not None:
            level = self._fixed
        elif active is not None:
            level = self._by_sms[self._controller.level_sms(now_s, active, pressure)]
        self._epoch += level != self._level
        return level, level

    def _active(self, now_s: float) -> bool | None:
        """Whether any downstream stage has work; None where that cannot be told now."""
        known: bool | None = False
        for stage in self._downstream:
            active = self._monitor.active(stage, now_s, SILENCE_S, LINGER_S)
            if active:
                return True
            if active is None:
                known = None
        return known


class DownstreamStage(Stage):
    """Takes its side of the level that the shared stage decided on."""

    _heard_s = float("-inf")

    def _choose(self, now_s: float) -> tuple[int | None, int]:
        decision = self._monitor.decision(self.levels, now_s)
        if decision is None:
            # Unreadable for a moment; or spatial control is off, or the shared stage gone.
            held = now_s - self._heard_s < LOOK_S
            return None, self._level if held else self._whole
        self._heard_s = now_s
        self._epoch = decision.epoch
        if self._monitor.active(SHARED_STAGE, now_s, SILENCE_S, LINGER_S) is False:
            return decision.level, self._whole
        return decision.level, min(decision.level, self._whole - 1)


class _Forward:
    """A class, as a generator context costs more than the rest of the bookkeeping."""

    __slots__ = ("_cap", "_new", "_stage")

    def __init__(self, stage: Stage, new: bool = True) -> None:
        self._stage, self._new = stage, new

    def __enter__(self) -> None:
        self._cap = self._stage.begin(self._new)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._cap.__exit__(kind, error, trace)
        finally:
            self._stage.end()
