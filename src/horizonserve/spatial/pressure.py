"""Memory pressure of the device: sampled in a thread, smoothed, read without waiting.

HorizonServe (4.4, 6.4) smooths NVML's memory activity with an EWMA of weight 0.4. Its figure is
renewed 1 to 6 times a second, far more seldom than the shared stage takes steps, so the EWMA here
moves per *new sample*, not per step: per step it would settle on one stale figure.

A source that fails makes the pressure None, "unknown", and the controller holds its level. It is
said in the log once per outage, and the source is opened anew after a growing pause.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

# Below vLLM's logger, whose handlers and level are the server's.
logger = logging.getLogger(f"vllm.{__name__}")

#: Weight of a new sample (HorizonServe 6.4).
GAMMA: Final = 0.4
#: Least time between two looks at a source: NVML takes a lock that launches may need too.
MIN_PERIOD_S: Final = 0.05
#: Without a new sample for so long the pressure is unknown. NVML's period is 1 s at most.
STALE_S: Final = 5.0
#: First and longest pause before a source that failed is opened again; after a failure-free
#: stretch as long as the longest, the next pause is the first again.
RETRY_S: Final = (1.0, 30.0)


class Sample(NamedTuple):
    """One figure of a source."""

    #: When it was taken, on the source's own clock.
    at_s: float
    #: Pressure in [0, 1].
    value: float


class SourceError(RuntimeError):
    """The source has no figure, and why."""


class Source(Protocol):
    """Where pressure is measured. Used by one thread; may take its time."""

    @property
    def name(self) -> str:
        """What is measured, for people."""
        ...

    def sample(self) -> Sequence[Sample]:
        """The samples that are new since the last call, oldest first; often none.

        Opens the source when it is not open.

        Raises:
            SourceError: there is no figure. The source is to be closed, and may be tried again.
        """
        ...

    def close(self) -> None:
        """Give back what the source holds. Safe to call again."""
        ...


class Sampler:
    """Looks at a source in a thread of its own and keeps the smoothed pressure."""

    def __init__(
        self,
        source: Source,
        *,
        gamma: float = GAMMA,
        period_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is opened before ``start``.

        Args:
            source: what to look at; closed together with the sampler.
            gamma: weight of a new sample, in (0, 1].
            period_s: time between two looks; a look that finds nothing new changes nothing.
            clock: the clock of ``pressure``'s argument, in seconds.

        Raises:
            ValueError: gamma is out of range, or the period below ``MIN_PERIOD_S``.
        """
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma {gamma}: must be above 0 and at most 1")
        if not period_s >= MIN_PERIOD_S:
            raise ValueError(f"period_s {period_s}: must be at least {MIN_PERIOD_S}")
        self._source = source
        self._gamma = gamma
        self._period_s = period_s
        self._clock = clock
        #: Time of the last look with a new sample, and the pressure then; replaced as a whole.
        self._latest: tuple[float, float] | None = None
        self._fresh_s = clock()
        self._failed_s = float("-inf")
        self._pause_s = RETRY_S[0]
        self._said_known: bool | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def pressure(self, now_s: float) -> float | None:
        """Smoothed pressure in [0, 1]; None when it is unknown. Never waits, never raises.

        ``now_s`` is time on the sampler's clock: the source may hang, and its last figure with it.
        """
        latest = self._latest
        if latest is None or now_s - latest[0] > STALE_S:
            return None
        return latest[1]

    def start(self) -> None:
        """Begin to sample. The thread does not keep the process alive."""
        self._fresh_s = self._clock()
        self._thread = threading.Thread(target=self._run, name="horizon-pressure", daemon=True)
        self._thread.start()

    def close(self, wait_s: float = 2.0) -> None:
        """Stop sampling; a source that hangs is left behind after ``wait_s``. Safe to repeat."""
        self._stop.set()
        if self._thread is None:
            self._close_source()
        else:
            self._thread.join(wait_s)
        self._latest = None

    def _run(self) -> None:
        while not self._stop.wait(self.look()):
            pass
        self._close_source()

    def look(self) -> float:
        """Look at the source once; returns the seconds until the next look is due."""
        try:
            samples = self._source.sample()
            now_s = self._clock()
            if not samples and now_s - self._fresh_s > STALE_S:
                raise SourceError(f"no new sample for {STALE_S:.0f} s")
        # Whatever a driver library comes up with: no measurement is worth a server.
        except Exception as error:
            return self._failed(error)
        if samples:
            self._take(samples, now_s)
        return self._period_s

    def _take(self, samples: Sequence[Sample], now_s: float) -> None:
        pressure = None if self._latest is None else self._latest[1]
        for sample in samples:
            if pressure is None:
                pressure = sample.value
            else:
                pressure += self._gamma * (sample.value - pressure)
        assert pressure is not None
        if self._latest is None:
            self._say(True, f"memory pressure from {self._source.name}")
        if now_s - self._failed_s > RETRY_S[1]:
            self._pause_s = RETRY_S[0]
        self._fresh_s = now_s
        self._latest = now_s, pressure

    def _failed(self, error: Exception) -> float:
        self._latest = None
        self._close_source()
        why = str(error) or type(error).__name__
        self._say(False, f"memory pressure unknown, SM level held: {self._source.name}: {why}")
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, RETRY_S[1])
        self._failed_s = self._clock()
        self._fresh_s = self._failed_s + pause_s  # the patience with a silent source starts anew
        return pause_s

    def _say(self, known: bool, message: str) -> None:
        """Log that the pressure has become known or unknown; that it still is goes without."""
        if known is not self._said_known:
            self._said_known = known
            logger.log(logging.INFO if known else logging.WARNING, "%s", message)

    def _close_source(self) -> None:
        with contextlib.suppress(Exception):
            self._source.close()
