"""The command line around a live record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from horizonserve import __version__, instance
from horizonserve.cli import app, apply_changes
from horizonserve.config import ConfigError, Settings
from horizonserve.instance import Record

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
        ("scheduler=fast", "default, edf, horizon"),
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
    doctor = ("doctor", "--instance", "1")
    for command in (("policy", "show"), ("policy", "set", "slots=2"), doctor):
        code, text = run(*command)
        assert code == 2
        assert "no live instance" in text


def test_apply_changes_keeps_the_rest() -> None:
    assert apply_changes(SETTINGS, ["slots=2"]).slo_text_ms == 500
    with pytest.raises(ConfigError):
        apply_changes(SETTINGS, ["=2"])


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
