"""The services of a multi-LoRA server and what each is promised (HALO, Tables 1 and 2).

A YAML file:

    services:
      triage: {ttft_ms: 2000, tbt_ms: 200, adapter: triage-lora}
      records: {ttft_ms: 1000, tbt_ms: 50}      # its adapter has the same name
    default: {ttft_ms: 2000, tbt_ms: 200}       # requests of no service

A request belongs to the service that it names, else to the one of its LoRA adapter, else to none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from horizonserve.slo import LEAST_MS

#: What a request is called that belongs to no service.
NONE: Final = "default"

#: Strict: neither true nor "5" is a number.
Ms = Annotated[float, Field(ge=LEAST_MS, allow_inf_nan=False, strict=True)]


class ServicesError(ValueError):
    """A table of services is wrong; the message names the file, the field and the remedy."""


class Service(BaseModel):
    """What a service promises."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_ms: Ms
    tbt_ms: Ms
    #: LoRA adapter whose requests are the service's; without one, that of the same name.
    adapter: str | None = None


class Promised(NamedTuple):
    """What a request was promised, and by which service."""

    service: str
    ttft_s: float
    tbt_s: float


class Services(BaseModel):
    """The services of a server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    services: dict[str, Service] = {}
    default: Service = Service(ttft_ms=2_000, tbt_ms=200)

    @model_validator(mode="after")
    def _one_of_an_adapter(self) -> Services:
        owners: dict[str, str] = {}
        for name, service in self.services.items():
            adapter = service.adapter or name
            if adapter in owners:
                raise ValueError(f"{owners[adapter]} and {name} both have adapter {adapter!r}")
            owners[adapter] = name
        if NONE in self.services:
            raise ValueError(f"{NONE!r} is what requests of no service are called")
        return self

    def of(self, named: str | None, adapter: str | None) -> tuple[str, Service]:
        """The service of a request, and its name.

        Raises:
            ServicesError: it names one that does not exist.
        """
        if named is not None:
            if named not in self.services:
                known = f"give one of {', '.join(self.services)}"
                remedy = known if self.services else "this server has no table of services"
                raise ServicesError(f"service={named!r}: unknown; {remedy}")
            return named, self.services[named]
        if adapter is not None:
            for name, service in self.services.items():
                if (service.adapter or name) == adapter:
                    return name, service
        return NONE, self.default

    def promised(
        self,
        named: str | None,
        adapter: str | None,
        ttft_ms: float | None = None,
        tbt_ms: float | None = None,
    ) -> Promised:
        """The promises of a request, which may have brought its own.

        Raises:
            ServicesError: it names a service that does not exist.
        """
        name, service = self.of(named, adapter)
        return Promised(name, (ttft_ms or service.ttft_ms) / 1e3, (tbt_ms or service.tbt_ms) / 1e3)

    @property
    def strictest_tbt_s(self) -> float:
        """The TBT that the batch has to keep."""
        return min(one.tbt_ms for one in (*self.services.values(), self.default)) / 1e3


def load(path: str | Path) -> Services:
    """Read a table.

    Raises:
        ServicesError: it cannot be read, or is none.
    """
    try:
        content: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    # A date that no calendar has is a ValueError, brackets without end recurse.
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ServicesError(f"{path}: cannot be read as YAML ({error})") from error
    if not isinstance(content, Mapping):
        raise ServicesError(f"{path}: must hold a mapping with `services`")
    try:
        return Services.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ServicesError(
            f"{path}: {field + '=' if field else ''}{first['input']!r:.60}: {first['msg']}"
        ) from error
