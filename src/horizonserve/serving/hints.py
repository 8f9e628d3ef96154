"""What a client may say about its request, and what is wrong with it when it is wrong.

Hints travel in ``SamplingParams.extra_args`` of the shared stage, because that is the only
per-request field that vLLM-Omni 0.30 carries from the request body to that stage's scheduler:

- ``slo_ms``, or ``ttft_ms``: first-response target of this request, milliseconds;
- ``tbt_ms``: promised time between the tokens of a text answer, milliseconds;
- ``slo_class``: its class, such as ``t2a``;
- ``service``: whose request it is, where services share a server;
- ``priority``: the paper's field (HorizonServe 5), 0 text, 10 audio, 20 image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from horizonserve.slo import LEAST_MS, RequestClass

KEYS: Final = ("slo_ms", "ttft_ms", "tbt_ms", "service", "slo_class", "priority")


class HintError(ValueError):
    """A malformed hint; the message names the field, the value and what would be right."""


@dataclass(frozen=True, slots=True)
class Hints:
    """Validated hints; None where the client said nothing."""

    slo_ms: float | None = None
    slo_class: RequestClass | None = None
    priority: int | None = None
    tbt_ms: float | None = None
    service: str | None = None


NO_HINTS: Final = Hints()


def parse(arguments: Mapping[str, Any] | None) -> Hints:
    """Hints among a request's extra arguments; other keys are not ours and are left alone.

    Raises:
        HintError: a value is malformed.
    """
    if not arguments or not any(key in arguments for key in KEYS):
        return NO_HINTS
    durations_ms: dict[str, float | None] = {}
    for key in ("slo_ms", "ttft_ms", "tbt_ms"):
        value = arguments.get(key)
        if value is not None and not _is_duration(value):
            raise HintError(
                f"{key}={value!r:.40}: give a finite number of milliseconds, {LEAST_MS:g} or more"
            )
        durations_ms[key] = None if value is None else float(value)
    ttft_ms = durations_ms.pop("ttft_ms")
    if ttft_ms is not None:
        if durations_ms["slo_ms"] is not None:
            raise HintError(f"ttft_ms={ttft_ms:g}: is another name of slo_ms; give one of them")
        durations_ms["slo_ms"] = ttft_ms
    service = arguments.get("service")
    if service is not None and not isinstance(service, str):
        raise HintError(f"service={service!r:.40}: give the name of a service")
    slo_class = arguments.get("slo_class")
    if slo_class is not None:
        try:
            slo_class = RequestClass(slo_class)
        except ValueError as error:
            choices = ", ".join(RequestClass)
            raise HintError(f"slo_class={slo_class!r}: give one of {choices}") from error
    priority = arguments.get("priority")
    if priority is not None and (not isinstance(priority, int) or isinstance(priority, bool)):
        raise HintError(f"priority={priority!r}: give an integer; 0 text, 10 audio, 20 image")
    return Hints(**durations_ms, slo_class=slo_class, priority=priority, service=service)


def _is_duration(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value) and value >= LEAST_MS
    except OverflowError:  # an integer beyond all floats
        return False
