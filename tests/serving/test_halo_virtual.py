"""The study on a virtual clock: its few lines give the times that vLLM's scheduler gives."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from horizonserve import instance
from horizonserve.workload.services import HOSPITAL, make_calls

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import halo_virtual  # noqa: E402

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("policy", ["fcfs", "vtc-t", "vtc-r", "qoserve", "halo", "halo-dynamic"])
def test_tokens_come_when_the_real_scheduler_class_has_them(
    policy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HORIZON_SERVICES", str(halo_virtual.TABLE))
    monkeypatch.setattr(halo_virtual, "BLOCKS", 40_000)
    # The benchmark is a process of its own and puts nothing back.
    monkeypatch.setattr(instance, "DIRECTORY", instance.DIRECTORY)
    monkeypatch.setattr(logging.root.manager, "disable", logging.root.manager.disable)
    calls = make_calls(HOSPITAL, 40.0, 3.0, seed=3)
    found = halo_virtual.play(halo_virtual.Stage(policy), calls, until_s=6.0)
    expected = halo_virtual.play_real(policy, calls, until_s=6.0)
    tokens = sum(map(len, expected.values()))
    assert tokens > 2_000 and found.keys() == expected.keys()
    for name, times_s in expected.items():
        assert found[name] == pytest.approx(times_s, abs=1e-4), name
