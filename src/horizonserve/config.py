"""Settings: one frozen model, the same names in every place a user can write them.

A field ``slo_t2a_ms`` is ``HORIZON_SLO_T2A_MS`` in the environment, ``slo_t2a_ms:`` in the YAML
file that ``HORIZON_CONFIG`` names, ``{"horizon": {"slo_t2a_ms": ...}}`` in a stage's
``additional_config``, and ``slo_t2a_ms=...`` for ``horizonserve policy set``. Precedence, first
wins: live record > ``additional_config`` > environment > YAML file > built-in default.
``--scheduler`` sets ``HORIZON_SCHEDULER`` and so counts as environment.
"""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Annotated, Any, Final, Literal, get_args

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from horizonserve import profile
from horizonserve.slo import LEAST_MS, Output, RequestClass

ENV_PREFIX: Final = "HORIZON_"
ENV_CONFIG_FILE: Final = "HORIZON_CONFIG"

SchedulerName = Literal[
    "default", "edf", "horizon", "halo", "fcfs", "vtc-t", "vtc-r", "qoserve", "qoserve-static"
]
#: HALO's baselines: orders of the waiting requests, nothing else (policy/baselines.py).
BASELINES: Final = ("fcfs", "vtc-t", "vtc-r", "qoserve", "qoserve-static")
SCHEDULERS: Final[tuple[SchedulerName, ...]] = get_args(SchedulerName)
#: What every stage process must read alike, before it serves: environment or file only.
START_ONLY: Final = (
    "spatial_backend",
    "s_min_sms",
    "s_cap_sms",
    "pressure",
    "graphs_per_level",
    "step_log",
    "profile",
    "profile_mismatch",
    "services",
    "paced",
    "first_token",
    "on_finish",
    "lora_table",
    "lora_overlap",
)


class ConfigError(ValueError):
    """A setting is wrong; the message names the field, the value and what would be right."""


def _not_a_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


Number = Annotated[float, BeforeValidator(_not_a_bool), Field(allow_inf_nan=False)]
Ms = Annotated[Number, Field(ge=LEAST_MS)]
Count = Annotated[int, BeforeValidator(_not_a_bool), Field(ge=1)]

#: First-response targets (ms) of a class for which nothing was set or profiled.
DEFAULT_SLO_MS: Final = {Output.TEXT: 1_000.0, Output.AUDIO: 10_000.0, Output.IMAGE: 30_000.0}


class Settings(BaseSettings):
    """Everything the scheduler can be told. Times are in the unit their name ends with."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    scheduler: SchedulerName = "default"

    # First-response targets, per output modality and per class; the class wins.
    slo_text_ms: Ms | None = None
    slo_audio_ms: Ms | None = None
    slo_image_ms: Ms | None = None
    slo_t2t_ms: Ms | None = None
    slo_a2t_ms: Ms | None = None
    slo_i2t_ms: Ms | None = None
    slo_v2t_ms: Ms | None = None
    slo_t2a_ms: Ms | None = None
    slo_a2a_ms: Ms | None = None
    slo_i2a_ms: Ms | None = None
    slo_v2a_ms: Ms | None = None
    slo_t2i_ms: Ms | None = None
    slo_i2i_ms: Ms | None = None

    #: Estimated solo time to first response per class; without one, SLO / ``slo_multiple``.
    estimate_ms: dict[RequestClass, Ms] = {}
    #: What `horizon-profile slo` wrote. Its solo p95 gives the targets that nothing else sets, and
    #: its curves the estimates; one of another platform, model or version is refused or used.
    profile: Annotated[str, Field(max_length=256)] | None = None
    profile_mismatch: Literal["refuse", "warn"] = "refuse"
    #: What a request needs is learned from answers, beginning with the profile or the settings, or
    #: is what the settings say of its class.
    estimates: Literal["learned", "constant"] = "learned"
    #: Solo p95 per class; the profile's, where it has the class.
    solo_p95_ms: dict[RequestClass, Ms] = {}
    #: m of SLO(class) = m x solo p95 (HorizonServe 6.1).
    slo_multiple: Annotated[Number, Field(gt=1)] = 5.0

    # Promised time between the tokens of a text answer, for all and per class; the class wins.
    tbt_text_ms: Ms | None = None
    tbt_t2t_ms: Ms | None = None
    tbt_a2t_ms: Ms | None = None
    tbt_i2t_ms: Ms | None = None
    tbt_v2t_ms: Ms | None = None
    #: Without one, this multiple of a token's time when a request is alone on the server, but never
    #: less than a reader needs for it.
    tbt_multiple: Annotated[Number, Field(gt=1)] = 1.5
    reading_ms: Ms = 100.0

    #: Run the largest batch that keeps every promise, and lend the places of decodes with slack
    #: (HALO 5) when it is full. Off is HorizonServe's literal policy.
    lending: bool = True
    #: Most requests that advance in a step; without one it follows from the step times.
    batch: Count | None = None

    #: HALO and its baselines: the table of services and their promises (services.py).
    services: Annotated[str, Field(max_length=256)] | None = None
    #: Iterations are filled as long as they end within the strictest TBT, and not up to B =
    #: ``token_budget`` tokens. Without a choice, on where there is no token budget.
    dynamic_budget: bool | None = None
    #: Most time that a request may have in the bank; without one there is no bound.
    max_bank_s: Annotated[Number, Field(gt=0, le=600)] | None = None
    #: Tokens leave for the client as promised, not as they are generated; the first one no earlier
    #: than promised (strict) or at once (asap), and the rest of a finished answer at once or not.
    paced: bool = True
    first_token: Literal["strict", "asap"] = "strict"
    on_finish: Literal["flush", "pace"] = "flush"

    # HorizonServe's own rules, which decide who waits. Without one of these, on where slots are not
    # lent: with lending they are worth nothing (docs/lending.md).
    #: N:M rotation between the short and the long path (HorizonServe 4.3).
    rotation: bool | None = None
    #: Requests with slack ratio below ``u_guard`` are exempt from rotation and cap.
    slack_guard: bool | None = None
    u_guard: Annotated[Number, Field(gt=0)] = 4.0
    #: Requests with slack ratio below ``u_lost`` (0: whose deadline has passed) go behind those
    #: that can still be saved, or keep their protection, which is the paper's literal rule.
    lost: Literal["demote", "protect"] = "demote"
    u_lost: Annotated[Number, Field(ge=0)] = 0.5
    #: Upper bound on ordinary long-path requests in the shared stage; a bound below switches it on.
    long_cap: bool | None = None
    #: The bound itself; without one, half of the usable slots.
    long_cap_requests: Count | None = None
    #: No path's first waiting request is held back for longer than this.
    max_hide_s: Annotated[Number, Field(gt=0, le=60)] = 5.0

    #: Cap the shared stage's SMs while downstream stages run (HorizonServe 4.4).
    spatial: bool = True
    #: With what: CUDA Green Contexts, CPU cores, or nothing but a record of the decisions. ``auto``
    #: is green contexts where there is a GPU, else no spatial control.
    spatial_backend: Literal["auto", "green", "cores", "dry-run"] = "auto"
    #: S_min and S_cap, in SMs (or cores); without them, a quarter and 0.6 of the device.
    s_min_sms: Count | None = None
    s_cap_sms: Count | None = None
    #: The shared stage has so many SMs whatever happens, if the ladder has that level: for sweeps.
    fixed_sms: Count | None = None
    #: B_sat: the pressure at which the shared stage gets S_cap.
    b_sat: Annotated[Number, Field(gt=0, le=1)] = 0.9
    #: A change of level needs so many rungs of difference, and so long since the last one.
    rung_step: Count = 1
    min_dwell_s: Annotated[Number, Field(ge=0, le=60)] = 0.5
    #: NVML's memory utilisation, or DRAM bandwidth (GPM, Hopper and later).
    pressure: Literal["utilization", "dram"] = "utilization"
    #: Capture CUDA graphs once per level; without it a stage with graphs cannot be capped.
    graphs_per_level: bool = False

    #: What `horizon-profile lora` wrote: base and LoRA layers run side by side as it says (HALO 4).
    lora_table: Annotated[str, Field(max_length=256)] | None = None
    #: What of a LoRA layer runs beside its base layer: the half that leaves all bits as they are,
    #: or all of it, which rounds once more.
    lora_overlap: Literal["shrink", "full"] = "shrink"

    #: Usable slots of the shared stage; at most, and by default, its ``max_num_seqs``.
    slots: Count | None = None
    #: Tokens per step; at most, and by default, the stage's ``max_num_batched_tokens``.
    token_budget: Count | None = None

    #: Where lending writes what each step did, one JSON object a line (serving/step_log.py). The
    #: name gets the process id, so that schedulers of one server do not share a file.
    #: Bounded, because the live record holds it.
    step_log: Annotated[str, Field(max_length=512)] | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Settings:
        if self.s_min_sms and self.s_cap_sms and self.s_min_sms > self.s_cap_sms:
            raise PydanticCustomError(
                "crossed", "above s_cap_sms={cap}", {"cap": self.s_cap_sms, "field": "s_min_sms"}
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # ``load`` merges the sources itself, because a user is told where a value came from.
        return (init_settings,)

    @property
    def caps(self) -> bool:
        """Whether the spatial controller acts: it is half of ``horizon``, not of the others."""
        return self.spatial and self.scheduler == "horizon"

    @property
    def lends(self) -> bool:
        """Whether slots are lent."""
        return self.lending and self.scheduler == "horizon"

    @property
    def fills_by_time(self) -> bool:
        """Whether HALO's iterations are filled up to a time, not up to a number of tokens."""
        return self.token_budget is None if self.dynamic_budget is None else self.dynamic_budget

    @property
    def serves_services(self) -> bool:
        """Whether promises are those of services, not those of classes."""
        return self.scheduler == "halo" or self.scheduler in BASELINES

    @property
    def rotates(self) -> bool:
        """Whether short and long path take turns."""
        return not self.lending if self.rotation is None else self.rotation

    @property
    def guards(self) -> bool:
        """Whether little slack exempts from being hidden."""
        return not self.lending if self.slack_guard is None else self.slack_guard

    @property
    def caps_long(self) -> bool:
        """Whether long requests in the shared stage are bounded."""
        if self.long_cap is None:
            return not self.lending or self.long_cap_requests is not None
        return self.long_cap

    def slo_ms(self, request_class: RequestClass) -> float:
        """First-response target of the class."""
        return self._slo(request_class)[0]

    def slo_field(self, request_class: RequestClass) -> str | None:
        """The field that decided ``slo_ms``; None when it is the built-in default."""
        return self._slo(request_class)[1]

    def _slo(self, request_class: RequestClass) -> tuple[float, str | None]:
        for field in (f"slo_{request_class.value}_ms", f"slo_{request_class.output.value}_ms"):
            if (value := getattr(self, field)) is not None:
                return value, field
        if (p95_ms := self.solo_p95_ms.get(request_class)) is not None:
            return self.slo_multiple * p95_ms, "solo_p95_ms"
        return DEFAULT_SLO_MS[request_class.output], None

    def tbt_ms(self, request_class: RequestClass, solo_ms: float) -> float:
        """Promised time between the tokens of a text answer.

        ``request_class`` may be another one, where a client says so. ``solo_ms``: time of a token
        when a request is alone, as far as it is known.
        """
        for field in (f"tbt_{request_class.value}_ms", "tbt_text_ms"):
            if (value := getattr(self, field, None)) is not None:
                return float(value)
        return max(self.tbt_multiple * solo_ms, self.reading_ms)

    def estimated_ms(self, request_class: RequestClass) -> float:
        """Estimated time from the shared stage's first step to the first response."""
        return (
            self.estimate_ms.get(request_class)
            or self.solo_p95_ms.get(request_class)
            or self.slo_ms(request_class) / self.slo_multiple
        )

    def changed(self, changes: Mapping[str, Any]) -> Settings:
        """A copy with some fields replaced, validated like any other input.

        Raises:
            ConfigError: an unknown field or a bad value.
        """
        return _validated({**self.model_dump(exclude_unset=True), **changes}, str)


_PER_CLASS: Final = ("estimate_ms", "solo_p95_ms")


def _env(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, text in environ.items():
        if not name.startswith(ENV_PREFIX) or name == ENV_CONFIG_FILE:
            continue
        field = name.removeprefix(ENV_PREFIX).lower()
        # A dictionary is written as in YAML: HORIZON_ESTIMATE_MS='{t2t: 80}'.
        values[field] = yaml.safe_load(text) if field in _PER_CLASS else text
    return values


def _file(path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(FilePath(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{ENV_CONFIG_FILE}={path!r}: cannot be read as YAML ({error}); name a readable file"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{ENV_CONFIG_FILE}={path!r}: must hold a mapping of settings, such as"
            " `slo_text_ms: 800`"
        )
    return {str(key): value for key, value in content.items()}


def load(
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[Settings, dict[str, str]]:
    """Settings from overrides, environment and file, and where each set field came from.

    Raises:
        ConfigError: names the field as its source spells it, the value and what would be right.
    """
    environ = os.environ if environ is None else environ
    path = environ.get(ENV_CONFIG_FILE)
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    layers: tuple[tuple[str, Mapping[str, Any]], ...] = (
        (f"file {path}", _file(path) if path else {}),
        ("environment", _env(environ)),
        ("additional_config", overrides or {}),
    )
    for source, values in layers:
        merged.update(values)
        sources.update(dict.fromkeys(values, source))

    for field in START_ONLY:
        if field in (overrides or {}):
            raise ConfigError(
                f"{field} (additional_config)={merged[field]!r}: one stage's settings do not reach"
                f" the others; set {ENV_PREFIX}{field.upper()} or the file {ENV_CONFIG_FILE} names"
            )

    def spelled(field: str) -> str:
        source = sources.get(field, "")
        return f"{ENV_PREFIX}{field.upper()}" if source == "environment" else f"{field} ({source})"

    settings = _validated(merged, spelled)
    if settings.step_log is not None and (why := _unwritable(FilePath(settings.step_log))):
        raise ConfigError(
            f"{spelled('step_log')}={settings.step_log!r}: {why}; {_remedy('step_log')}"
        )
    if settings.profile is not None:
        settings = _profiled(settings, sources, spelled("profile"))
    return settings, sources


def _profiled(settings: Settings, sources: dict[str, str], spelled: str) -> Settings:
    """The settings with what their profile says, where they say nothing themselves."""
    try:
        found = profile.load(settings.profile or "")
    except profile.ProfileError as error:
        raise ConfigError(f"{spelled}: {error}") from error
    alone_ms = {name: one.solo_p95_ms for name, one in found.classes.items()}
    changes: dict[str, Any] = {"solo_p95_ms": {**alone_ms, **settings.solo_p95_ms}}
    of_profile: dict[str, Any] = {"slo_multiple": found.slo_multiple}
    backend = "green" if settings.spatial_backend == "auto" else settings.spatial_backend
    if (sms := found.sms) is not None and sms.backend == backend:
        # A bound that crosses one that was set says nothing.
        low, high = settings.s_min_sms, settings.s_cap_sms
        s_min_sms = None if high and (sms.s_min_sms or 0) > high else sms.s_min_sms
        s_cap_sms = None if low and (sms.s_cap_sms or low) < low else sms.s_cap_sms
        of_profile |= {"s_min_sms": s_min_sms, "s_cap_sms": s_cap_sms, "b_sat": sms.b_sat}
    for name, value in of_profile.items():
        if value is not None and name not in settings.model_fields_set:
            changes[name] = value
    for name in changes:
        sources.setdefault(name, f"profile {settings.profile}")
    return settings.changed(changes)


def _unwritable(path: FilePath) -> str | None:
    """Why no file can be written beside ``path``, or at it."""
    if not path.name or path.is_dir():
        return "is a directory"
    try:
        # Permission bits do not tell of a read-only or virtual file system.
        with tempfile.TemporaryFile(dir=path.parent):
            return None
    except OSError as error:
        return f"its directory cannot be written to ({error.strerror})"


def _validated(values: Mapping[str, Any], spelled: Any) -> Settings:
    for field in values:
        if field not in Settings.model_fields:
            close = difflib.get_close_matches(field, Settings.model_fields, n=1)
            remedy = f"did you mean {close[0]}?" if close else "remove it"
            raise ConfigError(f"{spelled(field)}={values[field]!r}: unknown setting; {remedy}")
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        # What concerns two fields is not at either of them.
        field = str(first["loc"][0] if first["loc"] else first["ctx"]["field"])
        inner = "".join(f".{part}" for part in first["loc"][1:] if isinstance(part, str))
        value = first["input"] if first["loc"] else values[field]
        raise ConfigError(
            f"{spelled(field)}{inner}={value!r}: {first['msg']}; {_remedy(field)}"
        ) from error


def _remedy(field: str) -> str:
    choices = {
        "scheduler": ", ".join(SCHEDULERS[:-1]) + f" or {SCHEDULERS[-1]}",
        "services": "the path of a table of services, such as configs/services/hospital.yaml",
        "first_token": "strict or asap",
        "on_finish": "flush or pace",
        "max_bank_s": "a number of seconds above 0 and at most 600, such as 2",
        "lost": "demote or protect",
        "profile": "the path of a file that `horizon-profile slo` wrote",
        "profile_mismatch": "refuse or warn",
        "estimates": "learned or constant",
        "spatial_backend": "auto, green, cores or dry-run",
        "pressure": "utilization or dram",
        "b_sat": "a number above 0 and at most 1, such as 0.9",
        "lora_table": "the path of a file that `horizon-profile lora` wrote",
        "lora_overlap": "shrink or full",
        "step_log": "the path of a file in a directory that exists and can be written to",
        "min_dwell_s": "a number of seconds from 0 to 60, such as 0.5",
    }
    if field in choices:
        return f"give {choices[field]}"
    if field.endswith("_sms"):
        return "give a whole number of SMs, s_min_sms at most s_cap_sms"
    if field.endswith("_ms"):
        return f"give a finite number of milliseconds, {LEAST_MS:g} or more, such as 800"
    if field.endswith("_s"):
        return "give a number of seconds above 0 and at most 60, such as 5"
    annotation = Settings.model_fields[field].annotation
    if annotation in (bool, bool | None):
        return "give on or off"
    return "give a finite number above 0"
