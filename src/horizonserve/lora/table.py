"""Which SMs base and LoRA layer get, frozen: the file that `horizon-profile lora` writes.

YAML, checked against the models below. One row for each kind of layer and number of tokens that
was measured: the two sides of a split, or neither where one after the other is as good. A number
of tokens that has no row runs one after the other too.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from horizonserve.lora.parallel import Overlap, Pair
from horizonserve.profile import Model, Platform, Versions
from horizonserve.shared_file import replace_text

SCHEMA_VERSION: Final = 1

#: Of the decoder layers of a model, in order.
Kind = Literal["qkv", "o", "gate_up", "down"]
KINDS: Final[tuple[Kind, ...]] = ("qkv", "o", "gate_up", "down")

Count = Annotated[int, Field(ge=1)]
Ms = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TableError(ValueError):
    """A table cannot be used; the message names file, field, value and remedy."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Adapters(_Part):
    """What decides how much work a LoRA layer is."""

    max_loras: Count
    max_rank: Count


class Shape(_Part):
    """A base layer: it takes tokens x inputs and gives tokens x outputs."""

    inputs: Count
    outputs: Count


class Row(_Part):
    """A kind of layer at a number of tokens; times are of a decoder layer without attention."""

    layer: Kind
    #: As padded for the graph.
    tokens: Count
    sequential_ms: Ms
    base_sms: Count | None = None
    lora_sms: Count | None = None
    overlapped_ms: Ms | None = None

    @model_validator(mode="after")
    def _whole(self) -> Row:
        given = [value is not None for value in (self.base_sms, self.lora_sms, self.overlapped_ms)]
        if any(given) and not all(given):
            raise ValueError("base_sms, lora_sms and overlapped_ms come together or not at all")
        return self

    @property
    def pair(self) -> Pair | None:
        """SMs of base and LoRA layer; None for one after the other."""
        if self.base_sms is None or self.lora_sms is None:
            return None
        return self.base_sms, self.lora_sms


class Table(_Part):
    """The partitions of a model on a device."""

    schema_version: Literal[1] = SCHEMA_VERSION
    #: *measured on <GPU>*.
    kind: str
    platform: Platform
    model: Model
    adapters: Adapters
    overlap: Overlap
    versions: Versions
    date: datetime.date
    layers: dict[Kind, Shape]
    rows: tuple[Row, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Table:
        seen = set()
        for number, row in enumerate(self.rows):
            where = f"rows.{number} ({row.layer}, {row.tokens} tokens)"
            if row.layer not in self.layers:
                raise ValueError(f"{where}: layers has no {row.layer}")
            if (row.layer, row.tokens) in seen:
                raise ValueError(f"{where}: there are two of it")
            seen.add((row.layer, row.tokens))
            if row.pair is not None and sum(row.pair) != self.platform.units:
                raise ValueError(
                    f"{where}: base_sms and lora_sms are {sum(row.pair)} together, not the"
                    f" {self.platform.units} SMs of the device"
                )
        return self

    @cached_property
    def _pairs(self) -> Mapping[tuple[str, int], Pair | None]:
        return {(row.layer, row.tokens): row.pair for row in self.rows}

    def pair(self, layer: str, tokens: int) -> Pair | None:
        """SMs of base and LoRA layer; None for one after the other."""
        return self._pairs.get((layer, tokens))

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Every partition, once."""
        return tuple(dict.fromkeys(row.pair for row in self.rows if row.pair is not None))

    @property
    def tokens(self) -> tuple[int, ...]:
        """Numbers of tokens at which some layer has a partition, rising."""
        return tuple(sorted({row.tokens for row in self.rows if row.pair is not None}))

    def mismatches(
        self,
        platform: Platform | None = None,
        model: Model | None = None,
        adapters: Adapters | None = None,
        versions: Versions | None = None,
        overlap: Overlap | None = None,
    ) -> list[str]:
        """How what runs here differs from what was measured; what is None is not compared.

        The name of a model is not compared, as the same one lies in many directories, nor the
        version of this package.
        """
        found = []
        for title, here, mine in (
            ("platform", platform, self.platform),
            ("model", model, self.model),
            ("adapters", adapters, self.adapters),
            ("versions", versions, self.versions),
        ):
            for field in type(here).model_fields if here is not None else ():
                measured, now = getattr(mine, field), getattr(here, field)
                if field in ("name", "horizonserve", "vllm_omni") or None in (measured, now):
                    continue
                if measured != now:
                    found.append(f"{title}.{field} is {now!r} here, {measured!r} in the table")
        if overlap not in (None, self.overlap):
            found.append(f"lora_overlap is {overlap!r} here, {self.overlap!r} in the table")
        return found

    def with_row(self, row: Row) -> Table:
        """With one more row, in order of layer and tokens."""
        rows = sorted((*self.rows, row), key=lambda one: (KINDS.index(one.layer), one.tokens))
        return Table.model_validate({**dict(self), "rows": tuple(rows)})


def load(path: Path | str) -> Table:
    """Read a table.

    Raises:
        TableError: it cannot be read, or is no table of this version.
    """
    remedy = "make one with `horizon-profile lora`"
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: cannot be read ({error}); name a readable file") from error
    except (yaml.YAMLError, ValueError) as error:  # the latter of a date that no calendar has
        first = str(error).partition("\n")[0]
        raise TableError(f"{path}: not YAML, perhaps cut short ({first}); {remedy}") from error
    if not isinstance(content, Mapping):
        raise TableError(f"{path}: holds no table; {remedy}")
    if content.get("schema_version") != SCHEMA_VERSION:
        raise TableError(
            f"{path}: schema_version={content.get('schema_version')!r}: this HorizonServe reads"
            f" {SCHEMA_VERSION}; {remedy}"
        )
    try:
        return Table.model_validate(content)
    except ValidationError as error:
        first_error = error.errors()[0]
        field = ".".join(map(str, first_error["loc"])) or "table"
        given = first_error["input"]
        value = "..." if isinstance(given, Mapping | list) else repr(given)
        raise TableError(
            f"{path}: {field}={value}: {first_error['msg']}; correct it, or {remedy}"
        ) from error


def kept(path: Path, empty: Table) -> Table:
    """The table that is there, if it is whole and of the same as ``empty``; else ``empty``."""
    with contextlib.suppress(TableError):
        found = load(path)
        if found.layers == empty.layers and not found.mismatches(
            empty.platform, empty.model, empty.adapters, empty.versions, empty.overlap
        ):
            return found
    return empty


def save(table: Table, path: Path) -> None:
    """Write a table, all of it or nothing.

    Raises:
        OSError: it cannot be written.
    """
    replace_text(path, dump(table))


def dump(table: Table) -> str:
    """The text of a table, a row a line."""
    plain = table.model_dump(mode="json", exclude_none=True)
    plain["rows"] = [_rounded(row) for row in plain["rows"]]
    # None: what holds no collections itself is written on one line.
    return yaml.safe_dump(plain, sort_keys=False, width=1_000, default_flow_style=None)


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: float(f"{value:.5g}") if isinstance(value, float) else value
        for key, value in row.items()
    }


def missing(table: Table, captured: Iterable[int]) -> list[int]:
    """Of the numbers of tokens that a server captures, those without any row."""
    known = {row.tokens for row in table.rows}
    return [tokens for tokens in captured if tokens not in known]
