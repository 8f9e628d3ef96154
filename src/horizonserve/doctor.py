"""`horizonserve doctor`: what there is, what a server would do, and what limits its promises.

Looks at a running server if there is one, else at what a server that is started here would read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Final

from horizonserve import facts, instance, profile, services
from horizonserve.config import ENV_CONFIG_FILE, ConfigError, Settings, load
from horizonserve.process import environment
from horizonserve.slo import RequestClass
from horizonserve.spatial import ladder
from horizonserve.spatial.driver import DriverError, levels_here
from horizonserve.spatial.report import gpu_conditions, report

#: How long a running server is watched.
WATCH_S: Final = 3.0


@dataclass(slots=True)
class Findings:
    """What was found, as plain data."""

    content: dict[str, Any] = field(default_factory=dict)
    #: What would help.
    advice: list[str] = field(default_factory=list)
    #: What keeps a server from starting, or the plugin from acting.
    wrong: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0: fine, 1: advice, 2: wrong."""
        return 2 if self.wrong else 1 if self.advice else 0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**self.content, "advice": self.advice, "wrong": self.wrong}


def examine(
    pid: int | None = None, config: str | None = None, profile_file: str | None = None
) -> Findings:
    """Everything that can be known without starting a server.

    Args:
        pid: of the instance, where several run; None takes the only one, or none.
        config: settings file instead of the one that ``HORIZON_CONFIG`` names.
        profile_file: profile instead of the one that the settings name.

    Raises:
        InstanceError: there is no instance ``pid``, or several and none was named.
    """
    found = Findings()
    installed = facts.versions()
    found.content["versions"] = installed.model_dump()
    if installed.vllm == facts.UNKNOWN:
        found.wrong.append("vLLM is not installed in this environment")
    found.content["plugin"] = _plugin(found)
    here = facts.platform()
    found.content["platform"] = here.model_dump()
    running = instance.find(pid) if pid is not None or list(instance.live()) else None
    settings, sources = _settings(found, running, config, profile_file)
    solo = _profile(found, settings, here, running)
    found.content["slos"] = _slos(found, settings, sources, solo)
    found.content["services"] = _services(found, settings)
    if running is None:
        found.content["instance"] = None
        found.content["spatial"] = _planned(settings)
    else:
        _instance(found, running)
    defaults = [name for name in RequestClass if settings.slo_field(name) is None]
    by_class = settings.scheduler != "default" and not settings.serves_services
    if by_class and len(defaults) == len(RequestClass):
        found.advice.append(
            "no SLO is set; every class has a built-in default that fits no machine: run"
            " `horizon-profile slo`, or set HORIZON_SLO_TEXT_MS and so on"
        )
    return found


def _plugin(found: Findings) -> dict[str, Any]:
    names = {point.name for point in entry_points(group="vllm.general_plugins")}
    allowed = os.environ.get("VLLM_PLUGINS")
    if "horizonserve" not in names:
        why = "not installed as a vLLM plugin; pip install it into this environment"
    elif allowed is not None and "horizonserve" not in allowed.split(","):
        why = f"VLLM_PLUGINS={allowed!r} leaves it out; add horizonserve"
    else:
        why = None
    if why is not None:
        found.wrong.append(why)
    return {"loads": why is None, "why": why}


def _settings(
    found: Findings, running: instance.Instance | None, config: str | None, profile_file: str | None
) -> tuple[Settings, Mapping[str, str]]:
    """What applies, and where it came from."""
    if running is not None and config is None and profile_file is None:
        return running.settings, _sources(running)
    environ = dict(os.environ)
    if config is not None:
        environ[ENV_CONFIG_FILE] = config
    if profile_file is not None:
        environ["HORIZON_PROFILE"] = profile_file
    try:
        settings, sources = load(environ=environ)
    except ConfigError as error:
        found.wrong.append(str(error))
        return Settings(), {}
    active = settings.scheduler != "default"
    found.content["plugin"]["active"] = active
    if not active:
        found.content["plugin"]["why_not_active"] = (
            "no scheduler is chosen here; start the server with --scheduler horizon"
        )
    return settings, sources


def _sources(running: instance.Instance) -> Mapping[str, str]:
    """Where a server has its settings from: what it started with, if that still says the same."""
    try:
        started, sources = load(environ=environment(running.pid))
    except (OSError, ConfigError):
        return {}
    now = running.settings
    return {
        name: sources[name]
        if name in sources and getattr(started, name) == getattr(now, name)
        else "additional_config, or set while it runs"
        for name in now.model_fields_set
    }


def _planned(settings: Settings) -> dict[str, Any]:
    """The levels that a server would make here, and what is in the way."""
    if not settings.caps:
        return {"state": "off"}
    if settings.spatial_backend == "dry-run":
        return {"state": "dry run"}
    found: dict[str, Any] = {}
    try:
        if settings.spatial_backend != "cores":
            found["conditions"] = gpu_conditions(os.getpid())
            if wrong := [why for why in found["conditions"].values() if why]:
                return found | {"state": "refused", "why": wrong[0]}
        die, levels = levels_here(settings.spatial_backend)
        chosen = ladder.choose(die, levels, settings.s_min_sms, settings.s_cap_sms)
    except (DriverError, ValueError) as error:
        return found | {"state": "refused", "why": str(error)}
    rows = [[level.shared_sms, level.downstream_sms] for level in chosen]
    return found | {"state": "possible", "levels": rows}


def _profile(
    found: Findings,
    settings: Settings,
    here: profile.Platform,
    running: instance.Instance | None,
) -> Mapping[RequestClass, profile.ClassProfile]:
    if settings.profile is None:
        found.content["profile"] = None
        return {}
    try:
        read = profile.load(settings.profile)
    except profile.ProfileError as error:
        found.wrong.append(str(error))
        return {}
    served = read.model
    if running is not None:
        served = profile.Model(name="", **running.identity.get("architecture", {}))
    # Without a server nobody knows its model.
    different = read.differences(here, served, facts.versions())
    found.content["profile"] = {"path": settings.profile, "kind": read.kind, "differs": different}
    if different:
        said = found.wrong if settings.profile_mismatch == "refuse" else found.advice
        said.append(f"{settings.profile}: {'; '.join(different)}; run `horizon-profile slo` here")
    return read.classes


def _services(found: Findings, settings: Settings) -> dict[str, Any] | None:
    """What the services of a server are promised, where they are."""
    if not settings.serves_services:
        return None
    if settings.services is None:
        found.advice.append(
            "no table of services: every request has the built-in promises; set HORIZON_SERVICES"
        )
        table = services.Services()
    else:
        try:
            table = services.load(settings.services)
        except services.ServicesError as error:
            found.wrong.append(str(error))
            return None
    promised = {**table.services, services.NONE: table.default}
    return {name: one.model_dump(exclude_none=True) for name, one in promised.items()}


def _slos(
    found: Findings,
    settings: Settings,
    sources: Mapping[str, str],
    solo: Mapping[RequestClass, profile.ClassProfile],
) -> list[dict[str, Any]]:
    rows = []
    for name in RequestClass:
        field_name = settings.slo_field(name)
        source = sources.get(field_name or "")
        slo_ms = settings.slo_ms(name)
        p95_ms = solo[name].solo_p95_ms if name in solo else settings.solo_p95_ms.get(name)
        feasible = None if p95_ms is None else slo_ms >= p95_ms
        rows.append(
            {
                "class": name.value,
                "slo_ms": slo_ms,
                "set_by": field_name or "built-in default",
                "source": source,
                "solo_p95_ms": p95_ms,
                "feasible": feasible,
            }
        )
        if feasible is False:
            found.advice.append(
                f"{name.value}: its SLO of {slo_ms:g} ms is less than the {p95_ms:g} ms that one"
                " request in twenty takes even alone; it cannot be kept"
            )
    return rows


def _instance(found: Findings, running: instance.Instance) -> None:
    before = running.counters
    time.sleep(WATCH_S)
    now = instance.find(running.pid)
    spatial = report(now.identity["spatial"], now.settings)
    if now.settings.caps and now.settings.spatial_backend in ("auto", "green"):
        spatial["conditions"] = gpu_conditions(now.pid)
    found.content |= {
        "instance": {
            "pid": now.pid,
            **now.identity,
            "applied": now.applied,
            "settings": now.settings.model_dump(mode="json", exclude_none=True),
            "counters": now.counters._asdict(),
        },
        "spatial": spatial,
    }
    found.content["plugin"]["active"] = now.settings.scheduler != "default"
    found.content["plugin"].pop("why_not_active", None)
    found.advice += diagnose(now, before)
    if spatial["state"] == "refused":
        found.advice.append(f"spatial control is refused: {spatial['why']}")


def diagnose(found: instance.Instance, before: instance.Counters) -> list[str]:
    """Advice on slots, from an instance's counters now and a moment before."""
    settings, counters = found.settings, found.counters
    most = found.identity["max_slots"]
    slots = min(settings.slots or most, most)
    steps = counters.steps - before.steps
    full = counters.full_steps - before.full_steps
    if steps and full > steps / 2:
        remedy = (
            f"`horizonserve policy set slots={min(2 * slots, most)}`"
            if slots < most
            else f"a max_num_seqs above {most} in the deploy file"
        )
        return [
            f"all {slots} slots were taken while requests waited in {full} of {steps} steps:"
            f" more slots may help more than any policy; try {remedy} and watch the time per token"
        ]
    if slots < 4:
        return [
            f"{slots} slots: order decides little; set max_num_seqs to 4 or more"
            if most < 4
            else f"{slots} of {most} slots usable: order decides little; use 4 or more"
        ]
    return []
