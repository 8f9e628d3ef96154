"""The table of services: whose a request is, and what a bad file is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from horizonserve.services import Promised, Service, Services, ServicesError, load

TABLE = Services(
    services={
        "triage": Service(ttft_ms=2_000, tbt_ms=200, adapter="triage-lora"),
        "records": Service(ttft_ms=1_000, tbt_ms=50),
    },
    default=Service(ttft_ms=3_000, tbt_ms=100),
)


@pytest.mark.parametrize(
    ("named", "adapter", "own", "promised"),
    [
        (None, None, {}, Promised("default", 3.0, 0.1)),
        (None, "triage-lora", {}, Promised("triage", 2.0, 0.2)),
        (None, "records", {}, Promised("records", 1.0, 0.05)),
        (None, "another", {}, Promised("default", 3.0, 0.1)),
        ("records", "triage-lora", {}, Promised("records", 1.0, 0.05)),
        ("records", None, {"ttft_ms": 70.0}, Promised("records", 0.07, 0.05)),
        (None, None, {"tbt_ms": 20.0}, Promised("default", 3.0, 0.02)),
    ],
)
def test_whose_a_request_is_and_what_it_is_promised(
    named: str | None, adapter: str | None, own: dict[str, float], promised: Promised
) -> None:
    assert TABLE.promised(named, adapter, **own) == pytest.approx(promised)


def test_a_service_that_does_not_exist_is_named() -> None:
    with pytest.raises(ServicesError, match=r"service='x': unknown; give one of triage, records"):
        TABLE.promised("x", None)


def test_without_a_table_there_is_no_service() -> None:
    with pytest.raises(ServicesError, match="no table of services"):
        Services().promised("x", None)


def test_the_batch_has_to_keep_the_strictest_promise() -> None:
    assert TABLE.strictest_tbt_s == 0.05
    assert Services(default=Service(ttft_ms=1, tbt_ms=7)).strictest_tbt_s == 0.007


@pytest.mark.parametrize("file", ["hospital", "service_center"])
def test_the_shipped_tables(file: str) -> None:
    table = load(Path(__file__).parents[1] / "configs" / "services" / f"{file}.yaml")
    assert len(table.services) == 4 and table.strictest_tbt_s == 0.05


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must hold a mapping"),
        ("[]", "must hold a mapping"),
        ("services: [", "cannot be read as YAML"),
        ("services: null", "services=None"),
        ("services: {a: {ttft_ms: 1, tbt_ms: 1.0e-322}}", "services.a.tbt_ms"),
        ("services: {a: {ttft_ms: 1, tbt_ms: 1, adapter: 2026-13-45}}", "cannot be read as YAML"),
        ("[" * 3_000, "cannot be read as YAML"),
        ("services: {1: {ttft_ms: 1, tbt_ms: 2}}", "services.1"),
        ("services: {a: {ttft_ms: 1}}", "services.a.tbt_ms"),
        ("services: {a: {ttft_ms: .nan, tbt_ms: 2}}", "services.a.ttft_ms=nan"),
        ("services: {a: {ttft_ms: .inf, tbt_ms: 2}}", "services.a.ttft_ms=inf"),
        ("services: {a: {ttft_ms: 0, tbt_ms: 2}}", "services.a.ttft_ms=0"),
        ("services: {a: {ttft_ms: true, tbt_ms: 2}}", "services.a.ttft_ms=True"),
        ("services: {a: {ttft_ms: '5', tbt_ms: 2}}", "services.a.ttft_ms='5'"),
        ("services: {a: {ttft_ms: 1, tbt_ms: 2, adaptor: x}}", "services.a.adaptor='x'"),
        ("services: {default: {ttft_ms: 1, tbt_ms: 2}}", "requests of no service"),
        (
            "services: {a: {ttft_ms: 1, tbt_ms: 2}, b: {ttft_ms: 1, tbt_ms: 2, adapter: a}}",
            "a and b both have adapter 'a'",
        ),
    ],
)
def test_a_bad_table_is_told_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "services.yaml"
    path.write_text(text)
    with pytest.raises(ServicesError) as caught:
        load(path)
    assert str(path) in str(caught.value) and says in str(caught.value)


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ServicesError, match="cannot be read"):
        load(tmp_path / "none.yaml")
