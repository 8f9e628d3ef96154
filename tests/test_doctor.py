"""What the doctor says, with and without a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_cli import IDENTITY, SETTINGS, run
from test_profile import PLAIN

from horizonserve import facts, instance
from horizonserve.config import Settings
from horizonserve.doctor import diagnose
from horizonserve.instance import Counters, Instance, Record

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

ARCHITECTURE = {"architecture": "SomeArch", "hidden_size": 512}


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance, "DIRECTORY", tmp_path)
    monkeypatch.setattr("horizonserve.doctor.WATCH_S", 0.0)
    for name in [name for name in os.environ if name.startswith("HORIZON_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def record() -> Iterator[Record]:
    made = Record(SETTINGS, IDENTITY | {"architecture": ARCHITECTURE})
    yield made
    made.close()


def ask(*options: str) -> tuple[int, dict[str, Any]]:
    code, text = run("doctor", "--json", *options)
    return code, json.loads(text)


def profile_of_here(tmp_path: Path, **changes: Any) -> Path:
    here = {
        "platform": facts.platform().model_dump(),
        "versions": facts.versions().model_dump(exclude_none=True),
    }
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump(PLAIN | here | changes))
    return path


def seen(settings: Settings, **counters: int) -> Instance:
    return Instance(1, dict(IDENTITY), settings, Counters(**counters), True)


@pytest.mark.parametrize(
    ("settings", "counters", "advice"),
    [
        (SETTINGS, {"steps": 100, "full_steps": 80}, "policy set slots=8"),
        (SETTINGS.changed({"slots": 8}), {"steps": 100, "full_steps": 80}, "max_num_seqs above 8"),
        (SETTINGS, {"steps": 100, "full_steps": 20}, None),
        (SETTINGS.changed({"slots": 2}), {"steps": 100}, "2 of 8 slots"),
    ],
)
def test_advice_on_slots(settings: Settings, counters: dict[str, int], advice: str | None) -> None:
    lines = diagnose(seen(settings, **counters), Counters())
    assert lines == [] if advice is None else advice in lines[0]


@pytest.mark.parametrize(
    ("backend", "bounds", "state"),
    [
        ("cores", {"HORIZON_S_MIN_SMS": "1"}, "possible"),
        ("cores", {"HORIZON_S_MIN_SMS": "500"}, "refused"),
        ("dry-run", {}, "dry run"),
        ("auto", {}, "refused"),
    ],
)
def test_what_spatial_control_would_do(
    monkeypatch: pytest.MonkeyPatch, backend: str, bounds: dict[str, str], state: str
) -> None:
    monkeypatch.setenv("HORIZON_SCHEDULER", "horizon")
    for name, value in (bounds | {"HORIZON_SPATIAL_BACKEND": backend}).items():
        monkeypatch.setenv(name, value)
    assert ask()[1]["spatial"]["state"] == state


def test_without_a_server_it_says_what_one_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = ask()
    assert code == 0 and said["instance"] is None and said["plugin"]["loads"]
    assert "--scheduler horizon" in said["plugin"]["why_not_active"]
    assert said["versions"]["vllm"].startswith("0.30") and said["platform"]["units"] >= 1
    monkeypatch.setenv("HORIZON_SCHEDULER", "horizon")
    code, said = ask()
    assert code == 1 and "no SLO is set" in said["advice"][0] and said["plugin"]["active"]


def test_every_target_is_shown_with_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "horizon.yaml"
    file.write_text("scheduler: horizon\nslo_audio_ms: 9000\n")
    monkeypatch.setenv("HORIZON_SLO_A2T_MS", "400")
    profile = str(profile_of_here(tmp_path))
    code, said = ask("--config", str(file), "--profile", profile)
    assert code == 0, said
    rows = {row["class"]: (row["slo_ms"], row["set_by"], row["source"]) for row in said["slos"]}
    assert rows["a2t"] == (400, "slo_a2t_ms", "environment")
    assert rows["t2a"] == (9000, "slo_audio_ms", f"file {file}")
    assert rows["t2t"] == (1000, "solo_p95_ms", f"profile {tmp_path / 'profile.yaml'}")
    assert rows["t2i"] == (30_000, "built-in default", None)
    text = run("doctor", "--config", str(file))[1]
    assert "slo_audio_ms" in text and "spatial control: refused" in text


def test_a_target_that_cannot_be_kept_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HORIZON_SLO_TEXT_MS", "150")
    code, said = ask("--profile", str(profile_of_here(tmp_path)))
    assert code == 1 and "t2t: its SLO of 150 ms is less than the 200 ms" in said["advice"][0]


@pytest.mark.parametrize("mismatch", ["refuse", "warn"])
def test_a_profile_of_another_machine_is_wrong_unless_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mismatch: str
) -> None:
    monkeypatch.setenv("HORIZON_PROFILE_MISMATCH", mismatch)
    path = profile_of_here(tmp_path, platform={"device": "Another", "units": 7})
    code, said = ask("--profile", str(path))
    lines = said["wrong"] if mismatch == "refuse" else said["advice"]
    assert code == (2 if mismatch == "refuse" else 1)
    assert "platform.device" in lines[0] and "platform.units" in lines[0]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("HORIZON_SLO_TEXT_MS", "soon", "HORIZON_SLO_TEXT_MS='soon'"),
        ("HORIZON_CONFIG", "/none.yaml", "cannot be read"),
        ("HORIZON_PROFILE", "/none.yaml", "name a readable file"),
        ("VLLM_PLUGINS", "other", "leaves it out"),
    ],
)
def test_what_would_stop_a_server_is_wrong(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    code, said = ask()
    assert code == 2 and message in said["wrong"][0]


def test_a_running_server_is_watched(record: Record) -> None:
    assert ask()[0] == 0
    wanted = SETTINGS.changed({"slots": 1})
    instance.request(instance.find(), wanted, wait_s=0)
    record.poll()
    code, said = ask()
    assert code == 1 and "order decides little" in said["advice"][0]
    assert said["instance"]["max_slots"] == 8


CHILD = """
    import sys, time
    from pathlib import Path
    from horizonserve import instance
    from horizonserve.config import load
    instance.DIRECTORY = Path(sys.argv[1])
    settings = load({"slo_image_ms": 1})[0]
    identity = {"max_slots": 8, "spatial": {"state": "off"}}
    record = instance.Record(settings.changed({"slo_a2t_ms": 3}), identity)
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_running_server_tells_where_its_settings_are_from(tmp_path: Path) -> None:
    code = "\n".join(line[4:] for line in CHILD.splitlines())
    env = os.environ | {"HORIZON_SCHEDULER": "horizon", "HORIZON_SLO_TEXT_MS": "500"}
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env=env, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        rows = {row["class"]: row["source"] for row in ask()[1]["slos"]}
    finally:
        child.kill()
        child.wait()
    assert rows["t2t"] == "environment"
    assert rows["t2i"] == rows["a2t"] == "additional_config, or set while it runs"


def test_a_profile_of_another_model_than_runs_is_wrong(record: Record, tmp_path: Path) -> None:
    path = profile_of_here(tmp_path, model={"name": "x", "architecture": "OtherArch"})
    code, said = ask("--profile", str(path))
    assert code == 2 and "model.architecture" in said["wrong"][0]


def test_each_condition_of_spatial_control_is_shown() -> None:
    why = "stage 1: CUDA graphs"
    made = Record(SETTINGS, IDENTITY | {"spatial": {"state": "refused", "why": why}})
    code, said = ask()
    assert code == 1 and why in said["advice"][-1]
    assert list(said["spatial"]["conditions"]) == [
        "a GPU with green contexts",
        "MPS runs",
        "no thread percentage",
        "no SM partition",
    ]
    text = run("doctor")[1]
    assert "spatial control: refused" in text and "no SM partition: yes" in text
    made.close()


def test_services_are_shown_and_a_bad_table_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HORIZON_SCHEDULER", "halo")
    code, found = ask()
    assert any("HORIZON_SERVICES" in line for line in found["advice"])
    assert not any("no SLO is set" in line for line in found["advice"])
    table = tmp_path / "services.yaml"
    table.write_text("services: {a: {ttft_ms: 700, tbt_ms: 60}}")
    monkeypatch.setenv("HORIZON_SERVICES", str(table))
    code, found = ask()
    assert found["services"]["a"] == {"ttft_ms": 700, "tbt_ms": 60}
    assert "service a: TTFT 700 ms, TBT 60 ms" in run("doctor")[1]
    table.write_text("services: {a: {ttft_ms: -700, tbt_ms: 60}}")
    code, found = ask()
    assert code == 2
    assert any("ttft_ms" in line for line in found["wrong"])
