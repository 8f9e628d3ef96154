"""Profiles as files: what is written is read, and what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from horizonserve import profile
from horizonserve.profile import Model, Platform, Profile, ProfileError, Versions
from horizonserve.slo import RequestClass

ROOT = Path(__file__).parents[1]
PLAIN: dict[str, Any] = {
    "schema_version": 1,
    "kind": "measured on CPU engine",
    "platform": {"device": "A CPU @ 2.0 GHz", "units": 2},
    "model": {"name": "Small Model", "architecture": "SomeArch", "hidden_size": 512},
    "versions": {"horizonserve": "0.1", "vllm": "0.30.0", "vllm_omni": "0.30.0"},
    "date": "2026-11-30",
    "seed": 1,
    "slo_multiple": 5.0,
    "classes": {
        "t2t": {
            "samples": 12,
            "solo_p50_ms": 100.0,
            "solo_p95_ms": 200.0,
            "solo_p95_low_ms": 190.0,
            "solo_p95_high_ms": 220.0,
            "slo_ms": 1000.0,
            "tpot_p50_ms": 35.0,
            "per_answer_token_ms": 0.0,
            "sizes": [
                {
                    "prompt_words": 16,
                    "prompt_tokens": 23,
                    "answer_tokens": 16,
                    "samples": 6,
                    "first_p50_ms": 90.0,
                    "first_p95_ms": 99.0,
                    "shared_ms": 90.0,
                    "downstream_ms": 0.0,
                },
            ],
        }
    },
    "total_samples": 12,
}


def written(path: Path, plain: Any) -> Path:
    path.write_text(yaml.safe_dump(plain), encoding="utf-8")
    return path


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    made = Profile.model_validate(PLAIN)
    path = profile.place(tmp_path, made.platform, made.model)
    assert path == tmp_path / "a-cpu-2.0-ghz-2" / "small-model.yaml"
    profile.save(made, path)
    assert profile.load(path) == made
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_size_is_one_line(tmp_path: Path) -> None:
    text = profile.dump(Profile.model_validate(PLAIN))
    assert sum("prompt_tokens: 23" in line for line in text.splitlines()) == 1
    assert text.index("solo_p50_ms") < text.index("solo_p95_ms") < text.index("sizes")


def test_the_json_schema_in_the_repository_is_this_one() -> None:
    stored = json.loads((ROOT / "configs" / "profile.schema.json").read_text())
    assert stored == Profile.model_json_schema()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "profiles").rglob("*.yaml")) + sorted((ROOT / "configs").rglob("*.yaml"))
)
def test_profiles_in_the_repository_are_valid(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    if isinstance(content, dict) and "schema_version" in content:
        profile.load(path)


def _with(*keys: Any, value: Any) -> dict[str, Any]:
    plain = json.loads(json.dumps(PLAIN))
    at = plain
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    return dict(plain)


CLASS = ("classes", "t2t")


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        (_with("schema_version", value=2), "newer HorizonServe"),
        (_with("schema_version", value="1"), "schema_version='1'"),
        (_with("seed", value="x"), "seed='x'"),
        (_with("made_by", value="me"), "made_by"),
        (_with("classes", value={"t2x": {}}), "t2x"),
        (_with(*CLASS, "solo_p95_ms", value=-3.0), "classes.t2t.solo_p95_ms=-3.0"),
        (_with(*CLASS, "solo_p95_ms", value=0.2), "outside its interval"),
        (_with("total_samples", value=11), "the classes have 12"),
        (_with(*CLASS, "slo_ms", value=1.0), "slo_multiple x solo_p95_ms"),
        (_with(*CLASS, "solo_p50_ms", value=float("nan")), "solo_p50_ms"),
        (_with(*CLASS, "solo_p50_s", value=0.1), "solo_p50_s"),
        (_with(*CLASS, "sizes", value=[]), "sizes"),
        ([1, 2], "holds no profile"),
        ("text", "holds no profile"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, plain: Any, said: str) -> None:
    path = written(tmp_path / "p.yaml", plain)
    with pytest.raises(ProfileError) as caught:
        profile.load(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("keep", range(1, 20))
def test_a_truncated_profile_is_refused(tmp_path: Path, keep: int) -> None:
    text = profile.dump(Profile.model_validate(PLAIN))
    path = tmp_path / "p.yaml"
    path.write_text(text[: len(text) * keep // 20])
    with pytest.raises(ProfileError):
        profile.load(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="name a readable file"):
        profile.load(tmp_path / "none.yaml")


def test_new_figures_replace_those_of_the_same_and_a_mismatch_or_damage_replaces_all(
    tmp_path: Path,
) -> None:
    made = Profile.model_validate(PLAIN)
    same = (made.kind, made.platform, made.model, made.versions)
    path = written(tmp_path / "p.yaml", PLAIN)
    assert profile.kept(path, *same) == made
    t2t = made.classes[RequestClass.T2T]
    more = made.updated({RequestClass.A2T: t2t.model_copy(update={"samples": 30})}, 4.0)
    assert list(more.classes) == [RequestClass.T2T, RequestClass.A2T]
    assert more.classes[RequestClass.T2T].slo_ms == 800 and more.total_samples == 42
    assert Profile.model_validate(more.model_dump()) == more
    other = profile.kept(path, *same[:3], Versions(horizonserve="0.1", vllm="0.31.0"))
    assert other.classes == {} and other.versions.vllm == "0.31.0"
    path.write_text("cut: [")
    assert profile.kept(path, *same).classes == {}


def test_figures_of_a_publication_are_not_for_serving() -> None:
    made = Profile.model_validate({**PLAIN, "kind": profile.NOT_MEASURED})
    assert made.mismatches(made.platform, made.model, made.versions) == []
    assert len(made.differences(made.platform, made.model, made.versions)) == 1


def test_another_machine_model_or_version_is_a_mismatch() -> None:
    made = Profile.model_validate(PLAIN)
    assert made.mismatches(made.platform, made.model, made.versions) == []
    renamed = Model(name="elsewhere", architecture="SomeArch", hidden_size=512, layers=8)
    assert made.mismatches(made.platform, renamed, made.versions) == []
    found = made.mismatches(
        Platform(device="Another", units=4),
        Model(name="x", architecture="Other"),
        Versions(horizonserve="9", vllm="0.31.0", vllm_omni="0.30.0"),
    )
    assert [line.split(" ")[0] for line in found] == [
        "platform.device",
        "platform.units",
        "model.architecture",
        "versions.vllm",
    ]


def test_classes_are_by_name() -> None:
    assert list(Profile.model_validate(PLAIN).classes) == [RequestClass.T2T]
