"""Fixtures for tests on the real scheduler classes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from horizonserve import instance  # noqa: E402 (only where vLLM-Omni is installed)

Make = Callable[..., Any]


@pytest.fixture
def vllm_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """What our loggers under vLLM's say; vLLM keeps it from the root logger."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    for module in ("admission", "graphs", "hooks", "lora_overlap", "queue_view", "step_log"):
        # Importing the API server configures logging anew and disables what was there.
        logger = logging.getLogger(f"vllm.horizonserve.serving.{module}")
        monkeypatch.setattr(logger, "disabled", False)
        caplog.set_level(logging.INFO, logger.name)
    return caplog


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    """Make schedulers under given settings; closes them at the end of the test.

    ``make(cls, slots=4, settings={"scheduler": "edf"}, **engine)``. Time stands still unless the
    test moves ``scheduler.now_s[0]``.
    """
    from engine import make_scheduler, stop_clock

    monkeypatch.setattr(instance, "DIRECTORY", tmp_path)
    made = []

    def make_one(cls: type, settings: dict[str, Any] | None = None, **engine: Any) -> Any:
        chosen = {"scheduler": "horizon"} | (settings or {})
        scheduler = make_scheduler(cls, additional_config={"horizon": chosen}, **engine)
        stop_clock(scheduler)
        made.append(scheduler)
        return scheduler

    yield make_one
    for scheduler in made:
        scheduler.shutdown()
