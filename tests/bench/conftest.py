"""A fake server for every test of the driver, and a harness that does not wait long for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from horizonserve.bench import live as live_module

sys.path.insert(0, str(Path(__file__).parent))

from fake import Fake  # noqa: E402


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake has no stage process that a look at it could find at work."""
    monkeypatch.setattr(live_module, "_SAMPLE_S", 0.01)


@pytest.fixture
def fake(quick_looks: None) -> Iterator[Fake]:
    one = Fake()
    yield one
    one.record.close()
