"""How promises are counted, and how a table is fitted to a machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from horizonserve import services
from horizonserve.bench.services_study import FULL, ServicesConfig, kept, payload, scaled
from horizonserve.services import Promised
from horizonserve.workload.services import HOSPITAL, Call, make_calls

TABLE = services.load(Path(__file__).parents[2] / "configs" / "services" / "hospital.yaml")
PROMISE = Promised("s", 1.0, 0.1)


def test_tokens_as_they_came() -> None:
    found = kept(
        [PROMISE] * 4,
        [[0.9, 1.0, 1.1], [1.2, 1.25], [], [0.5, 0.7]],
        held=False,
        slack_s=0.001,
    )
    assert found["requests"] == 4
    assert found["late"] == 0.5  # one late, one without a token
    assert found["broken"] == pytest.approx(1 / 4)
    assert found["p99"] == np.inf


def test_tokens_that_are_held_are_late_only_if_they_were_not_there() -> None:
    ahead = [0.2, 0.3, 0.7, 1.15]  # released at 1.0, 1.1, 1.2, 1.3
    behind = [0.2, 1.35, 1.36]  # released at 1.0, 1.35, 1.45
    found = kept([PROMISE] * 2, [ahead, behind], held=True, slack_s=0.001)
    assert found["late"] == 0.0 and found["broken"] == pytest.approx(1 / 5)
    assert kept([PROMISE], [ahead], held=False, slack_s=0.001)["broken"] == pytest.approx(2 / 3)


def test_what_http_adds_breaks_nothing() -> None:
    times = [1.004, 1.108]
    assert kept([PROMISE], [times], held=False, slack_s=0.005)["late"] == 0
    assert kept([PROMISE], [times], held=False, slack_s=0.001)["late"] == 1


def test_promises_are_as_long_as_a_full_iteration_asks_for() -> None:
    table = scaled(TABLE, 0.092)
    assert table.strictest_tbt_s == pytest.approx(0.092 / FULL)
    for name, one in TABLE.services.items():
        assert table.services[name].ttft_ms == pytest.approx(2 * one.ttft_ms)
        assert table.services[name].tbt_ms == pytest.approx(2 * one.tbt_ms)
    assert table.default.tbt_ms == pytest.approx(2 * TABLE.default.tbt_ms)


def test_saturation_fills_every_iteration() -> None:
    config = ServicesConfig(table=TABLE, shapes=HOSPITAL, batch=16, full_s=0.05)
    calls = make_calls(HOSPITAL, config.saturation_rps, 500.0, 7, scale=config.length_scale)
    tokens = sum(call.prompt_tokens + 7 + call.answer_tokens for call in calls)
    assert tokens / 500.0 == pytest.approx(16 / 0.05, rel=0.1)


def test_halo_may_run_more_than_fit_into_an_iteration() -> None:
    config = ServicesConfig(table=TABLE, shapes=HOSPITAL, batch=8)
    assert config.changes("halo")["slots"] is None and config.changes("fcfs")["slots"] == 8
    by_themselves = {"qoserve", "halo-dynamic"}
    for policy in config.policies:
        budget = config.changes(policy)["token_budget"]
        assert budget == (None if policy in by_themselves else 8)
    assert config.changes("halo-paper")["lost"] == "protect"


def test_a_call_goes_to_the_adapter_of_its_service() -> None:
    request = payload(Call(0.0, "pre-assessment", 12, 5), 3, {"tbt_ms": 70})
    assert request["model"] == "pre-assessment" and request["max_tokens"] == 5
    assert len(request["messages"][0]["content"].split()) == 12
    assert request["vllm_xargs"] == {"tbt_ms": 70}
