"""What the children of test_nvml.py share: the answers to give, the calls made, a clock to set.

A child runs one test with the fake library in nvidia-ml-py's reach; the test's own process never
loads it.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from pathlib import Path

from horizonserve.spatial.nvml import NvmlSource
from horizonserve.spatial.pressure import Sampler

UUID = "GPU-11111111-2222-3333-4444-555555555555"
OTHER = "GPU-99999999-2222-3333-4444-555555555555"

#: Log lines, as LEVEL: message.
said: list[str] = []


class _Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        said.append(f"{record.levelname}: {record.getMessage()}")


logging.getLogger().addHandler(_Said())
logging.getLogger().setLevel(logging.INFO)


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


clock = Clock()


def answer(text: str, uuid: str = UUID) -> None:
    """What the library says from now on; see fake_nvml.c. ``text`` is about the first device."""
    control = Path(os.environ["FAKE_NVML"])
    aside = control.with_suffix(".new")
    aside.write_text(f"device {uuid}\n{text}\n")
    aside.rename(control)


def calls() -> Counter[str]:
    """How often each function of the library was called so far."""
    log = Path(os.environ["FAKE_NVML_LOG"])
    return Counter(log.read_text().split()) if log.exists() else Counter()


def open_users() -> int:
    """Initialisations that were not undone. Failed ones do not count if the test makes none."""
    made = calls()
    return made["nvmlInitWithFlags"] - made["nvmlShutdown"]


def source(gpm: bool = False) -> NvmlSource:
    return NvmlSource(UUID, gpm=gpm, clock=clock)


def sampler(gpm: bool = False) -> Sampler:
    return Sampler(source(gpm), clock=clock)


def look(at: Sampler) -> float | None:
    """One look, and the time until the next; the pressure then."""
    clock.pass_s(at.look())
    return at.pressure(clock())


def values(of: NvmlSource) -> list[float]:
    return [round(sample.value, 6) for sample in of.sample()]
