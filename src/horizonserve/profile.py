"""What a model takes on a machine: the file that `horizon-profile` writes and the server reads.

YAML, one mapping, checked against the models below (JSON schema: configs/profile.schema.json).
Times are milliseconds. Keys have a fixed order and figures are rounded, so that two profiles can be
compared line by line.
"""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from horizonserve.shared_file import replace_text
from horizonserve.slo import RequestClass

SCHEMA_VERSION: Final = 1
#: Figures from a publication, for reading; a server refuses to run by them.
NOT_MEASURED: Final = "from the paper, not measured here"

Finite = Annotated[float, Field(allow_inf_nan=False)]
Ms = Annotated[Finite, Field(gt=0)]
Amount = Annotated[Finite, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class ProfileError(ValueError):
    """A profile cannot be used; the message names the file, the field, the value and the remedy."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Platform(_Part):
    """The device that was measured."""

    device: str
    #: SMs of a GPU, cores of a CPU.
    units: Annotated[int, Field(ge=1)]


class Model(_Part):
    """The model of the shared stage; what is not known is left out."""

    name: str
    architecture: str | None = None
    hidden_size: int | None = None
    layers: int | None = None
    dtype: str | None = None


class Versions(_Part):
    """What it ran on."""

    horizonserve: str
    vllm: str
    vllm_omni: str | None = None


class Size(_Part):
    """Requests of one size, alone on the server."""

    prompt_words: Count
    audio_s: Amount = 0.0
    image_px: Count = 0
    video_frames: Count = 0
    #: Of the shared stage: media included, as the server counts them; and as was asked for.
    prompt_tokens: Annotated[int, Field(ge=1)]
    answer_tokens: Count
    samples: Annotated[int, Field(ge=1)]
    first_p50_ms: Ms
    first_p95_ms: Ms
    #: Of the median, what the shared stage takes and what the stages after it do (profiling/fit).
    shared_ms: Amount
    downstream_ms: Amount


class ClassProfile(_Part):
    """First responses of a class alone on the server, over all its sizes."""

    samples: Annotated[int, Field(ge=1)]
    solo_p50_ms: Ms
    solo_p95_ms: Ms
    #: Where the p95 of another such sweep falls, 95%.
    solo_p95_low_ms: Ms
    solo_p95_high_ms: Ms
    #: slo_multiple x solo p95.
    slo_ms: Ms
    #: Time per token of a text answer.
    tpot_p50_ms: Ms | None = None
    #: What a further answer token adds to the first response; 0 for text.
    per_answer_token_ms: Amount
    sizes: Annotated[tuple[Size, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> ClassProfile:
        if not self.solo_p95_low_ms <= self.solo_p95_ms <= self.solo_p95_high_ms:
            raise ValueError("solo_p95_ms lies outside its interval")
        if self.solo_p50_ms > self.solo_p95_ms:
            raise ValueError("solo_p50_ms is above solo_p95_ms")
        return self


class SmLevel(_Part):
    """The shared stage under one fixed cap."""

    shared_sms: Annotated[int, Field(ge=1)]
    downstream_sms: Count
    #: Decode alone.
    tpot_p50_ms: Ms | None = None
    #: First token of short requests while a stage downstream works.
    corun_ttft_p50_ms: Ms | None = None
    corun_ttft_p95_ms: Ms | None = None
    samples: Count = 0


class SmProfile(_Part):
    """The fixed-cap sweep (HorizonServe 3.3 and 4.2), and what was chosen from it."""

    backend: Literal["green", "cores", "none"]
    levels: Annotated[tuple[SmLevel, ...], Field(min_length=1)]
    s_min_sms: Annotated[int, Field(ge=1)] | None = None
    s_cap_sms: Annotated[int, Field(ge=1)] | None = None
    b_sat: Annotated[Finite, Field(gt=0, le=1)] | None = None


class Profile(_Part):
    """A model on a machine."""

    schema_version: Literal[1] = SCHEMA_VERSION
    #: *measured on CPU engine*, *measured on <GPU>*, or `NOT_MEASURED`.
    kind: str
    platform: Platform
    model: Model
    versions: Versions
    date: datetime.date
    seed: int
    slo_multiple: Annotated[Finite, Field(gt=1)] = 5.0
    classes: dict[RequestClass, ClassProfile] = {}
    #: Classes that the pipeline takes but that could not be measured, and why.
    failed: dict[RequestClass, str] = {}
    sms: SmProfile | None = None
    #: Over all classes. Written last, so that a file that was cut short is noticed.
    total_samples: Count

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        total = sum(one.samples for one in self.classes.values())
        if self.total_samples != total:
            raise ValueError(f"total_samples is {self.total_samples}, but the classes have {total}")
        for name, one in self.classes.items():
            slo_ms = self.slo_multiple * one.solo_p95_ms
            # To the digit that is written, and no further.
            if abs(one.slo_ms - slo_ms) > 0.01 * slo_ms:
                raise ValueError(
                    f"classes.{name.value}.slo_ms is {one.slo_ms:g}, but slo_multiple x solo_p95_ms"
                    f" is {slo_ms:g}"
                )
        return self

    def updated(self, classes: Mapping[RequestClass, ClassProfile], slo_multiple: float) -> Profile:
        """With these classes in the place of its own, and every target at this multiple."""
        merged = {**self.classes, **classes}
        kept = {
            name: merged[name].model_copy(
                update={"slo_ms": slo_multiple * merged[name].solo_p95_ms}
            )
            for name in RequestClass
            if name in merged
        }
        total = sum(one.samples for one in kept.values())
        update = {"classes": kept, "slo_multiple": slo_multiple, "total_samples": total}
        return self.model_copy(update=update)

    def differences(self, platform: Platform, model: Model, versions: Versions) -> list[str]:
        """Why a server must not run by it: `mismatches`, and figures that nobody measured."""
        found = self.mismatches(platform, model, versions)
        if self.kind == NOT_MEASURED:
            found.append("its figures were not measured but taken from a publication")
        return found

    def mismatches(self, platform: Platform, model: Model, versions: Versions) -> list[str]:
        """How a server differs from what was measured; empty if not at all.

        The name of a model is not compared: the same one lies in many directories.
        """
        found = []
        for title, here, mine in (
            ("platform", platform, self.platform),
            ("model", model, self.model),
            ("versions", versions, self.versions),
        ):
            for field in type(here).model_fields:
                measured, now = getattr(mine, field), getattr(here, field)
                # A later bug fix of ours changes no step's time.
                same = field in ("name", "horizonserve") or measured == now
                if not same and None not in (measured, now):
                    found.append(f"{title}.{field} is {now!r} here, {measured!r} in the profile")
        return found


def load(path: FilePath | str) -> Profile:
    """Read a profile.

    Raises:
        ProfileError: it cannot be read, is no profile, or of another schema.
    """
    try:
        content = yaml.safe_load(FilePath(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: cannot be read ({error}); name a readable file") from error
    except (yaml.YAMLError, ValueError) as error:  # the latter of a date that no calendar has
        raise ProfileError(
            f"{path}: not YAML, perhaps cut short ({_first_line(error)}); measure it again"
        ) from error
    if not isinstance(content, Mapping):
        raise ProfileError(f"{path}: holds no profile; make one with `horizon-profile slo`")
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        remedy = (
            "it comes from a newer HorizonServe; install that"
            if isinstance(version, int) and version > SCHEMA_VERSION
            else f"give schema_version: {SCHEMA_VERSION}, or measure it again"
        )
        raise ProfileError(f"{path}: schema_version={version!r}; {remedy}")
    try:
        return Profile.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "profile"
        value = first["input"] if not isinstance(first["input"], Mapping | list) else "..."
        raise ProfileError(
            f"{path}: {field}={value!r}: {first['msg']}; correct it, or measure it again"
        ) from error


def kept(
    path: FilePath, kind: str, platform: Platform, model: Model, versions: Versions
) -> Profile:
    """The profile that is there, if it is whole and of the same; else one without figures."""
    with contextlib.suppress(ProfileError):
        found = load(path)
        if not found.mismatches(platform, model, versions):
            return found
    return Profile(
        kind=kind,
        platform=platform,
        model=model,
        versions=versions,
        date=datetime.date.today(),
        seed=0,
        total_samples=0,
    )


def save(profile: Profile, path: FilePath) -> None:
    """Write a profile, all of it or nothing.

    Raises:
        OSError: it cannot be written.
    """
    replace_text(path, dump(profile))


def dump(profile: Profile) -> str:
    """The text of a profile."""
    plain = _rounded(profile.model_dump(mode="json", exclude_none=True))
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, width=1_000, allow_unicode=True)


def place(directory: FilePath, platform: Platform, model: Model) -> FilePath:
    """Where the profile of a model on a platform is kept."""
    return directory / _slug(f"{platform.device} {platform.units}") / f"{_slug(model.name)}.yaml"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "unnamed"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


class _Dumper(yaml.SafeDumper):
    """A size or a level on one line each: a table that can be read."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> Any:
        row = "prompt_tokens" in mapping or "shared_sms" in mapping
        return super().represent_mapping(tag, mapping, flow_style=row or flow_style)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
