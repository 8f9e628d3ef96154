"""The command line around a live record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from horizonserve import __version__, instance
from horizonserve.cli import app, apply_changes, diagnose
from horizonserve.config import ConfigError, Settings
from horizonserve.instance import Counters, Instance, Record

IDENTITY = {
    "model": "m",
    "stage": 0,
    "max_slots": 8,
    "min_token_budget": 32,
    "max_token_budget": 512,
    "spatial": {"state": "not prepared"},
}
SETTINGS = Settings().changed({"scheduler": "horizon", "slo_text_ms": 500, "slots": 4})


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    monkeypatch.setattr(instance, "DIRECTORY", tmp_path)
    made = Record(SETTINGS, IDENTITY)
    yield made
    made.close()


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_version() -> None:
    assert run("--version") == (0, f"{__version__}\n")


def test_show_prints_everything_as_json(record: Record) -> None:
    code, text = run("policy", "show", "--json")
    shown = json.loads(text)
    assert code == 0
    assert shown["settings"]["slots"] == 4
    assert shown["max_slots"] == 8
    assert shown["applied"] is True
    code, text = run("policy", "show")
    assert code == 0
    assert "settings.slo_text_ms" in text


def test_set_changes_and_clears(record: Record) -> None:
    code, text = run("policy", "set", "scheduler=edf", "slots=", "rotation=off", "slo_t2a_ms=9e3")
    assert (code, "accepted" in text) == (0, True)
    seen = record.poll()
    assert seen == Settings().changed(
        {"scheduler": "edf", "slo_text_ms": 500, "rotation": False, "slo_t2a_ms": 9000}
    )
    assert instance.find().applied


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("slots", "FIELD=VALUE"),
        ("slots=0", "slots=0"),
        ("slots=9", "started with 8"),
        ("token_budget=513", "takes 32 to 512"),
        ("token_budget=31", "takes 32 to 512"),
        ("slo_txt_ms=5", "did you mean slo_text_ms"),
        ("slo_txt_ms=", "did you mean slo_text_ms"),
        ("scheduler=fast", "default, edf or horizon"),
        ("slo_text_ms=nan", "milliseconds"),
        ("estimate_ms={t2t: -1}", "milliseconds"),
        ("slots=[", "slots"),
    ],
)
def test_a_bad_change_changes_nothing_and_says_what_would_be_right(
    record: Record, change: str, message: str
) -> None:
    code, text = run("policy", "set", "scheduler=edf", change)
    assert code == 2
    assert message in " ".join(text.split())
    assert record.poll() is None


def test_without_an_instance_every_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance, "DIRECTORY", tmp_path)
    for command in (("policy", "show"), ("policy", "set", "slots=2"), ("doctor",)):
        code, text = run(*command)
        assert code == 2
        assert "no live instance" in text


def test_apply_changes_keeps_the_rest() -> None:
    assert apply_changes(SETTINGS, ["slots=2"]).slo_text_ms == 500
    with pytest.raises(ConfigError):
        apply_changes(SETTINGS, ["=2"])


def seen(settings: Settings, **counters: int) -> Instance:
    return Instance(1, dict(IDENTITY), settings, Counters(**counters), True)


@pytest.mark.parametrize(
    ("settings", "counters", "advice"),
    [
        (SETTINGS, {"steps": 100, "full_steps": 80}, "policy set slots=8"),
        (SETTINGS.changed({"slots": 8}), {"steps": 100, "full_steps": 80}, "max_num_seqs above 8"),
        (SETTINGS, {"steps": 100, "full_steps": 20}, None),
        (SETTINGS.changed({"slots": 2}), {"steps": 100}, "2 of 8 slots"),
        (Settings().changed({"scheduler": "edf"}), {"steps": 1}, "no SLO is set"),
    ],
)
def test_advice(settings: Settings, counters: dict[str, int], advice: str | None) -> None:
    lines = diagnose(seen(settings, **counters), Counters())
    if advice is None:
        assert lines == []
    else:
        assert any(advice in line for line in lines), lines


def test_doctor_exits_with_one_when_it_has_advice(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horizonserve.cli.time.sleep", lambda _: None)
    assert run("doctor")[0] == 0
    wanted = SETTINGS.changed({"slots": 1})
    instance.request(instance.find(), wanted, wait_s=0)
    record.poll()
    code, text = run("doctor", "--json")
    assert code == 1
    assert "order decides little" in json.loads(text)["advice"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("spatial_backend=dry-run", "HORIZON_SPATIAL_BACKEND"),
        ("s_cap_sms=80", "HORIZON_S_CAP_SMS"),
        ("graphs_per_level=on", "read at start only"),
    ],
)
def test_what_is_read_at_start_only_is_refused_later(
    record: Record, change: str, message: str
) -> None:
    code, text = run("policy", "set", change)
    assert code == 2 and message in " ".join(text.split())
    assert record.poll() is None


def test_spatial_control_that_was_not_prepared_cannot_be_switched_on(record: Record) -> None:
    assert run("policy", "set", "spatial=off", "b_sat=0.5")[0] == 0
    record.poll()
    code, text = run("policy", "set", "spatial=on")
    assert code == 2 and "HORIZON_SPATIAL=on" in " ".join(text.split())


def test_doctor_shows_each_condition_of_spatial_control(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance, "DIRECTORY", tmp_path)
    monkeypatch.setattr("horizonserve.cli.time.sleep", lambda _: None)
    why = "stage 1: CUDA graphs"
    made = Record(SETTINGS, IDENTITY | {"spatial": {"state": "refused", "why": why}})
    code, text = run("doctor", "--json")
    said = json.loads(text)
    assert code == 1 and why in said["advice"][-1]
    assert list(said["spatial"]["conditions"]) == [
        "a GPU with green contexts",
        "MPS runs",
        "no thread percentage",
        "no SM partition",
    ]
    code, text = run("doctor")
    assert "spatial control: refused" in text and "no SM partition: yes" in text
    made.close()


def test_ladder_of_a_gpu_that_is_not_here() -> None:
    here = ("ladder", "--total-sms", "132", "--compute-capability", "9.0")
    code, output = run(*here, "--json")
    said = json.loads(output)
    assert code == 0 and said["total_sms"] == 132 and said["existing"] == 15
    assert len(said["levels"]) <= 6 and said["levels"][-1] == [132, 0]
    assert all(sum(level) == 132 for level in said["levels"])
    code, output = run(*here)
    assert code == 0 and "132 SMs" in output


@pytest.mark.parametrize(
    "options",
    [
        ("--total-sms", "132"),
        ("--total-sms", "132", "--compute-capability", "9"),
        ("--total-sms", "132", "--compute-capability", "5.2"),
    ],
)
def test_ladder_says_what_is_wrong(options: tuple[str, ...]) -> None:
    code, output = run("ladder", *options)
    assert code != 0 and "compute" in output
