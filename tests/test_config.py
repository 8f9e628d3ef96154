"""Settings: names, precedence and messages."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonserve.config import DEFAULT_SLO_MS, ConfigError, Settings, load
from horizonserve.slo import Output, RequestClass


def test_nothing_set_changes_nothing() -> None:
    settings, sources = load({}, {})
    assert settings.scheduler == "default"
    assert sources == {}
    assert settings.slo_ms(RequestClass.T2A) == DEFAULT_SLO_MS[Output.AUDIO]
    assert settings.slo_field(RequestClass.T2A) is None


def test_the_class_wins_over_the_modality() -> None:
    settings, _ = load({}, {"HORIZON_SLO_AUDIO_MS": "4000", "HORIZON_SLO_T2A_MS": "6e3"})
    assert settings.slo_ms(RequestClass.T2A) == 6000
    assert settings.slo_ms(RequestClass.A2A) == 4000
    assert settings.slo_field(RequestClass.A2A) == "slo_audio_ms"


def test_precedence_and_sources(tmp_path: Path) -> None:
    file = tmp_path / "horizon.yaml"
    file.write_text("slo_text_ms: 1\nslo_audio_ms: 2\nslo_image_ms: 3\nrotation: off\n")
    environ = {
        "HORIZON_CONFIG": str(file),
        "HORIZON_SLO_AUDIO_MS": "20",
        "HORIZON_SLO_IMAGE_MS": "30",
        "UNRELATED": "x",
    }
    settings, sources = load({"slo_image_ms": 300}, environ)
    assert (settings.slo_text_ms, settings.slo_audio_ms, settings.slo_image_ms) == (1, 20, 300)
    assert settings.rotation is False
    assert sources == {
        "slo_text_ms": f"file {file}",
        "rotation": f"file {file}",
        "slo_audio_ms": "environment",
        "slo_image_ms": "additional_config",
    }


def test_the_estimate_is_a_share_of_the_slo_unless_it_is_set() -> None:
    settings, _ = load({}, {"HORIZON_SLO_TEXT_MS": "500", "HORIZON_ESTIMATE_MS": "{a2t: 80}"})
    assert settings.estimated_ms(RequestClass.T2T) == 100
    assert settings.estimated_ms(RequestClass.A2T) == 80


@pytest.mark.parametrize(
    ("changes", "on"),
    [
        ({}, (False, False, False)),
        ({"lending": False}, (True, True, True)),
        ({"lending": False, "rotation": "off"}, (False, True, True)),
        ({"slack_guard": "on"}, (False, True, False)),
        ({"long_cap_requests": 3}, (False, False, True)),
        ({"long_cap_requests": 3, "long_cap": "off"}, (False, False, False)),
    ],
)
def test_the_papers_rules_are_on_where_slots_are_not_lent(
    changes: dict[str, object], on: tuple[bool, bool, bool]
) -> None:
    settings = Settings().changed(changes)
    assert (settings.rotates, settings.guards, settings.caps_long) == on


BAD_MS = ["abc", "", "0", "-1", "nan", "inf", "-inf", "1,5", "true"]


@pytest.mark.parametrize("value", BAD_MS)
@pytest.mark.parametrize("name", ["HORIZON_SLO_TEXT_MS", "HORIZON_SLO_T2A_MS"])
def test_a_bad_slo_in_the_environment_names_variable_value_and_remedy(
    name: str, value: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, {name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}={value!r}")
    assert "milliseconds, 0.01 or more" in message


@pytest.mark.parametrize(
    ("environ", "start", "remedy"),
    [
        ({"HORIZON_SLO_TXT_MS": "5"}, "HORIZON_SLO_TXT_MS='5'", "did you mean slo_text_ms"),
        ({"HORIZON_QQQQ": "5"}, "HORIZON_QQQQ='5'", "unknown setting"),
        ({"HORIZON_SCHEDULER": "fast"}, "HORIZON_SCHEDULER='fast'", "default, edf, horizon"),
        ({"HORIZON_LOST": "drop"}, "HORIZON_LOST='drop'", "demote or protect"),
        ({"HORIZON_ROTATION": "maybe"}, "HORIZON_ROTATION='maybe'", "on or off"),
        ({"HORIZON_MAX_HIDE_S": "61"}, "HORIZON_MAX_HIDE_S='61'", "at most 60"),
        ({"HORIZON_SLOTS": "0"}, "HORIZON_SLOTS='0'", "above 0"),
        ({"HORIZON_SLOTS": "2.5"}, "HORIZON_SLOTS='2.5'", "above 0"),
        ({"HORIZON_U_GUARD": "nan"}, "HORIZON_U_GUARD='nan'", "finite"),
        ({"HORIZON_ESTIMATE_MS": "{t2t: 0}"}, "HORIZON_ESTIMATE_MS.t2t=0", "milliseconds"),
        ({"HORIZON_ESTIMATE_MS": "{x: 5}"}, "HORIZON_ESTIMATE_MS.x", "milliseconds"),
        ({"HORIZON_SPATIAL_BACKEND": "gpu"}, "HORIZON_SPATIAL_BACKEND='gpu'", "cores or dry-run"),
        ({"HORIZON_B_SAT": "0"}, "HORIZON_B_SAT='0'", "at most 1"),
        ({"HORIZON_MIN_DWELL_S": "-1"}, "HORIZON_MIN_DWELL_S='-1'", "from 0 to 60"),
        ({"HORIZON_S_MIN_SMS": "0"}, "HORIZON_S_MIN_SMS='0'", "whole number of SMs"),
        ({"HORIZON_PRESSURE": "nvml"}, "HORIZON_PRESSURE='nvml'", "utilization or dram"),
        (
            {"HORIZON_S_MIN_SMS": "80", "HORIZON_S_CAP_SMS": "64"},
            "HORIZON_S_MIN_SMS='80': above s_cap_sms=64",
            "at most s_cap_sms",
        ),
        ({"HORIZON_STEP_LOG": ""}, "HORIZON_STEP_LOG='': is a directory", "path of a file"),
        ({"HORIZON_STEP_LOG": "/"}, "HORIZON_STEP_LOG='/': is a directory", "path of a file"),
        (
            {"HORIZON_STEP_LOG": "/nowhere/steps.jsonl"},
            "HORIZON_STEP_LOG='/nowhere/steps.jsonl': its directory cannot be written to (No such",
            "in a directory that exists",
        ),
        # It exists, and no permission makes it writable.
        ({"HORIZON_STEP_LOG": "/proc/steps.jsonl"}, "HORIZON_STEP_LOG='/proc/s", "be written to"),
        ({"HORIZON_STEP_LOG": "x" * 513}, "HORIZON_STEP_LOG='x", "at most 512 characters"),
        ({"HORIZON_CONFIG": "/nowhere.yaml"}, "HORIZON_CONFIG='/nowhere.yaml'", "readable"),
    ],
)
def test_bad_environment(environ: dict[str, str], start: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, environ)
    assert str(caught.value).startswith(start)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("slo_text_ms: soon", "slo_text_ms (file"),
        ("slo_text_ms: true", "true or false"),
        ("step_log: 5", "give the path of a file"),
        ("slo_text: 5", "did you mean slo_text_ms"),
        ("- 1", "must hold a mapping"),
        ("{", "cannot be read as YAML"),
        ("\x00", "cannot be read as YAML"),
    ],
)
def test_bad_file(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "horizon.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="(?s).*") as caught:
        load({}, {"HORIZON_CONFIG": str(file)})
    assert part in str(caught.value)


def test_bad_additional_config() -> None:
    with pytest.raises(ConfigError, match=r"slots \(additional_config\)='many'"):
        load({"slots": "many"}, {})


def test_what_all_stages_must_read_alike_is_not_one_stages_setting() -> None:
    with pytest.raises(ConfigError, match="HORIZON_S_CAP_SMS"):
        load({"s_cap_sms": 64}, {})
    settings, _ = load({"b_sat": 0.5}, {"HORIZON_S_CAP_SMS": "64", "HORIZON_SCHEDULER": "horizon"})
    assert (settings.b_sat, settings.s_cap_sms, settings.caps) == (0.5, 64, True)


def test_the_directory_of_the_step_log_is_tried_at_the_start_alone(tmp_path: Path) -> None:
    directory = tmp_path / "logs"
    directory.mkdir()
    file = directory / "steps.jsonl"
    settings, _ = load({}, {"HORIZON_STEP_LOG": str(file)})
    assert settings.step_log == str(file)
    assert not list(directory.iterdir())
    # The command line may run where there is no such directory.
    directory.rmdir()
    assert settings.changed({"slots": 4}).step_log == str(file)
    with pytest.raises(ConfigError, match="HORIZON_STEP_LOG"):
        load({"step_log": str(tmp_path / "steps.jsonl")}, {})


@pytest.mark.parametrize(
    ("scheduler", "spatial", "caps"),
    [("horizon", "on", True), ("horizon", "off", False), ("edf", "on", False)],
)
def test_spatial_control_is_half_of_horizon(scheduler: str, spatial: str, caps: bool) -> None:
    environ = {"HORIZON_SCHEDULER": scheduler, "HORIZON_SPATIAL": spatial}
    assert load({}, environ)[0].caps is caps


def test_settings_are_frozen_and_changed_by_copy() -> None:
    settings, _ = load({"slots": 4}, {})
    changed = settings.changed({"scheduler": "edf", "slo_t2t_ms": 80})
    assert (changed.scheduler, changed.slots, changed.slo_t2t_ms) == ("edf", 4, 80)
    assert settings.scheduler == "default"
    with pytest.raises(ConfigError, match="slots=0"):
        settings.changed({"slots": 0})
    with pytest.raises(ConfigError, match="unknown setting"):
        settings.changed({"slot": 3})


@given(st.text(max_size=20), st.text(max_size=20))
def test_any_environment_is_settings_or_a_config_error(name: str, value: str) -> None:
    try:
        settings, _ = load({}, {f"HORIZON_{name}": value, "HORIZON_SLO_TEXT_MS": value})
    except ConfigError as error:
        assert str(error)
    else:
        assert isinstance(settings, Settings)


@pytest.mark.parametrize(
    "name",
    ["configs/horizon.yaml", "configs/paper.yaml", "configs/cpu_2_cores_small.yaml"],
)
def test_the_shipped_files_are_valid(name: str) -> None:
    file = Path(__file__).parents[1] / name
    _, sources = load({}, {"HORIZON_CONFIG": str(file)})
    assert len(sources) >= 2


@pytest.mark.parametrize(("name", "scheduler"), [("mps", "default"), ("edf_mps", "edf")])
def test_the_baselines_differ_in_the_scheduler_alone(name: str, scheduler: str) -> None:
    file = Path(__file__).parents[1] / "configs" / f"{name}.yaml"
    settings, sources = load({}, {"HORIZON_CONFIG": str(file)})
    assert settings.scheduler == scheduler
    assert list(sources) == ["scheduler"]
    # The command in the header is of this file.
    assert f"HORIZON_CONFIG=configs/{name}.yaml scripts/mps run -- " in file.read_text()
