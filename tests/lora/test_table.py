"""The table of partitions: what is written is read back, and what is wrong is named."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from horizonserve.lora.table import (
    KINDS,
    Adapters,
    Row,
    Table,
    TableError,
    kept,
    load,
    missing,
    save,
)
from horizonserve.profile import Model, Platform, Versions

TOTAL = 132


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    keys = draw(st.sets(st.tuples(st.sampled_from(KINDS), st.integers(1, 512)), max_size=8))
    found = []
    for layer, tokens in keys:
        ms = draw(st.floats(1e-3, 1e3))
        side = draw(st.none() | st.integers(1, TOTAL - 1))
        pair = {} if side is None else {"base_sms": side, "lora_sms": TOTAL - side}
        pair |= {} if side is None else {"overlapped_ms": ms / 2}
        found.append(Row(layer=layer, tokens=tokens, sequential_ms=ms, **pair))
    return found


def table(*found: Row, **changes: object) -> Table:
    content = {
        "kind": "made up",
        "platform": Platform(device="GPU", units=TOTAL),
        "model": Model(name="m", architecture="A", hidden_size=64, layers=2, dtype="bfloat16"),
        "adapters": Adapters(max_loras=4, max_rank=16),
        "overlap": "shrink",
        "versions": Versions(horizonserve="1", vllm="0.30.0"),
        "date": datetime.date(2026, 1, 2),
        "layers": {kind: {"inputs": 64, "outputs": 128} for kind in KINDS},
        "rows": found,
    }
    return Table.model_validate(content | changes)


@given(rows())
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, found) -> None:
    path = tmp_path_factory.mktemp("tables") / "deep" / "table.yaml"
    made = table()
    for row in found:
        made = made.with_row(row)
    save(made, path)
    read = load(path)
    for row in found:
        assert read.pair(row.layer, row.tokens) == row.pair
    assert len(read.rows) == len(found)
    assert set(read.pairs) == {row.pair for row in found} - {None}
    assert list(read.tokens) == sorted({row.tokens for row in found if row.pair})
    assert not read.mismatches(
        made.platform, made.model, made.adapters, made.versions, made.overlap
    )
    # A row a line, as people compare two tables.
    assert sum("sequential_ms" in line for line in path.read_text().splitlines()) == len(found)
    assert not list(path.parent.glob(".*"))


def test_what_is_not_in_it_runs_one_after_the_other() -> None:
    row = Row(layer="o", tokens=8, sequential_ms=1.0, base_sms=96, lora_sms=36, overlapped_ms=0.9)
    made = table(row)
    assert made.pair("o", 8) == (96, 36)
    assert made.pair("o", 9) is None and made.pair("qkv", 8) is None
    assert missing(made, [1, 8, 16]) == [1, 16]


ONE = {"layer": "o", "tokens": 8, "sequential_ms": 1.0}
PAIR = {"base_sms": 96, "lora_sms": 36, "overlapped_ms": 0.9}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rows": [ONE | PAIR | {"lora_sms": 35}]}, "rows.0 (o, 8 tokens): base_sms and lora_sms"),
        ({"rows": [ONE, ONE]}, "rows.1 (o, 8 tokens): there are two"),
        ({"rows": [ONE | {"layer": "v"}]}, "rows.0.layer='v'"),
        ({"rows": [ONE | {"base_sms": 8}]}, "come together"),
        ({"rows": [ONE | {"tokens": 0}]}, "rows.0.tokens=0"),
        ({"rows": [ONE | {"sequential_ms": float("nan")}]}, "rows.0.sequential_ms=nan"),
        ({"rows": [ONE], "layers": {}}, "layers has no o"),
        ({"overlap": "half"}, "overlap='half'"),
        ({"speed": 3}, "speed=3"),
        ({"schema_version": 2}, "schema_version=2"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_remedy(
    tmp_path: Path, change: dict[str, object], named: str
) -> None:
    path = tmp_path / "table.yaml"
    save(table(), path)
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    with pytest.raises(TableError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and named in message
    assert "horizon-profile lora" in message


@pytest.mark.parametrize("text", ["- a list", "{cut: short", "date: 2026-99-01", "\x00"])
def test_a_file_that_is_no_table_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.yaml"
    with pytest.raises(TableError, match="cannot be read"):
        load(path)
    path.write_text(text)
    with pytest.raises(TableError, match="table.yaml: ") as caught:
        load(path)
    assert "horizon-profile lora" in str(caught.value)


@pytest.mark.parametrize(
    ("here", "found"),
    [
        ({"platform": Platform(device="other", units=TOTAL)}, "platform.device is 'other' here"),
        ({"platform": Platform(device="GPU", units=108)}, "platform.units is 108 here, 132"),
        ({"model": Model(name="n", hidden_size=32)}, "model.hidden_size is 32 here, 64"),
        ({"adapters": Adapters(max_loras=8, max_rank=16)}, "adapters.max_loras is 8 here, 4"),
        ({"versions": Versions(horizonserve="1", vllm="0.31")}, "versions.vllm is '0.31' here"),
        ({"overlap": "full"}, "lora_overlap is 'full' here, 'shrink'"),
    ],
)
def test_another_device_or_model_is_told(here: dict[str, object], found: str) -> None:
    (told,) = table().mismatches(**here)
    assert told.startswith(found)


def test_the_same_in_another_directory_is_the_same() -> None:
    same = Model(name="elsewhere", architecture="A", hidden_size=64, layers=2, dtype="bfloat16")
    assert table().mismatches(model=same, versions=Versions(horizonserve="2", vllm="0.30.0")) == []


def test_rows_are_kept_only_of_the_same(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    assert kept(path, table()) == table()
    row = Row(layer="o", tokens=8, sequential_ms=1.0)
    save(table(row), path)
    assert kept(path, table()).rows == (row,)
    for changes in ({"overlap": "full"}, {"layers": {"o": {"inputs": 64, "outputs": 64}}}):
        assert kept(path, table(**changes)).rows == ()
    path.write_text("cut: [")
    assert kept(path, table()).rows == ()
