"""The plan of a LoRA measurement, and what is made of its times."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from horizonserve.lora.table import KINDS, Adapters, Table
from horizonserve.profile import Model, Platform, Versions
from horizonserve.profiling.cli import app
from horizonserve.profiling.lora import Layer, LoraConfig, Plan, fill, layers_of, planned, row

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 128,
}
CONFIG = LoraConfig(adapters=Adapters(max_loras=4, max_rank=16), tokens=(8, 64))
TOTAL = 132


@pytest.fixture
def model(tmp_path: Path) -> Path:
    pytest.importorskip("transformers")
    path = tmp_path / "llama"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA))
    return path


class Known:
    """A machine whose kernels come in waves, and whose times are known."""

    def __init__(self, base_blocks: int, lora_blocks: int, fork_us: float) -> None:
        self.blocks = {"base": base_blocks, "lora": lora_blocks}
        self.fork_us = fork_us
        self.steps: list[object] = []

    def alone_s(self, kind: str, tokens: int, part: str, sms: int) -> float:
        return math.ceil(self.blocks[part] / sms) * 10e-6

    def step_s(self, kind: str, tokens: int, pair: tuple[int, int] | None) -> float:
        self.steps.append(pair)
        if pair is None:
            parts = (self.alone_s(kind, tokens, part, TOTAL) for part in self.blocks)
            return sum(parts)
        assert sum(pair) == TOTAL
        base_s = self.alone_s(kind, tokens, "base", pair[0])
        lora_s = self.alone_s(kind, tokens, "lora", pair[1])
        return max(base_s, lora_s) + self.fork_us * 1e-6


def plan(*tokens: int) -> Plan:
    layers = {kind: Layer(64, (64,)) for kind in KINDS}
    return Plan(layers, tokens, tuple(range(8, 125, 4)), TOTAL)


@given(st.integers(1, 600), st.integers(1, 600), st.floats(0, 20))
def test_a_row_is_granted_by_one_split_and_never_worse_than_none(
    base_blocks: int, lora_blocks: int, fork_us: float
) -> None:
    machine = Known(base_blocks, lora_blocks, fork_us)
    found = row(machine, plan(8), "o", 8)
    assert len(machine.steps) == len(set(machine.steps))
    # At most the pairs that there are, and one after the other.
    assert len(machine.steps) <= len(plan(8).counts) + 1
    if found.pair is None:
        return
    assert sum(found.pair) == TOTAL and set(found.pair) <= set(plan(8).counts)
    assert found.overlapped_ms is not None and found.overlapped_ms < found.sequential_ms
    assert found.overlapped_ms == pytest.approx(1e3 * machine.step_s("o", 8, found.pair))


def test_little_work_beside_much_is_overlapped() -> None:
    # One wave of the whole and a little: the base layer loses nothing by leaving some.
    found = row(Known(base_blocks=96, lora_blocks=30, fork_us=1.0), plan(8), "o", 8)
    assert found.pair is not None and found.pair[0] >= 96


def test_a_dear_fork_is_not_taken() -> None:
    assert row(Known(96, 30, fork_us=50.0), plan(8), "o", 8).pair is None


def empty() -> Table:
    return Table(
        kind="made up",
        platform=Platform(device="GPU", units=TOTAL),
        model=Model(name="m"),
        adapters=CONFIG.adapters,
        overlap="shrink",
        versions=Versions(horizonserve="1", vllm="0.30.0"),
        date=datetime.date(2026, 1, 2),
        layers={kind: {"inputs": 64, "outputs": 64} for kind in KINDS},
    )


def ticking(step_s: float) -> Callable[[], float]:
    now_s = [0.0]

    def clock() -> float:
        now_s[0] += step_s
        return now_s[0]

    return clock


def test_a_sweep_ends_with_its_budget_and_goes_on_later() -> None:
    machine, saved = Known(96, 30, 1.0), []
    half, why = fill(empty(), plan(8, 64), machine, 4.5, saved.append, clock=ticking(1.0))
    assert why and len(half.rows) == 4 and saved[-1] == half
    assert [len(one.rows) for one in saved] == [1, 2, 3, 4]
    before = len(machine.steps)
    full, why = fill(half, plan(8, 64), machine, 100.0, saved.append, clock=ticking(1.0))
    assert not why
    assert {(one.layer, one.tokens) for one in full.rows} == set(plan(8, 64).keys)
    assert len(machine.steps) == 2 * before
    assert fill(full, plan(8, 64), machine, 100.0, saved.append) == (full, "")
    assert len(machine.steps) == 2 * before


def test_the_layers_are_those_of_the_model() -> None:
    found = layers_of(SimpleNamespace(**LLAMA))
    assert found["qkv"] == Layer(64, (64, 32, 32)) and found["o"] == Layer(64, (64,))
    assert found["gate_up"] == Layer(64, (96, 96)) and found["down"] == Layer(96, (64,))
    wide = layers_of(SimpleNamespace(**LLAMA | {"head_dim": 32, "num_key_value_heads": None}))
    assert wide["qkv"] == Layer(64, (128, 128, 128)) and wide["o"] == Layer(128, (64,))


@pytest.mark.parametrize(
    ("change", "said"),
    [({"num_experts": 8}, "num_experts"), ({"intermediate_size": None}, "no intermediate_size")],
)
def test_other_models_are_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        layers_of(SimpleNamespace(**LLAMA | change))


def test_the_shapes_are_those_of_vllms_layers(model: Path) -> None:
    pytest.importorskip("vllm")
    from transformers import AutoConfig
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    theirs = get_hf_text_config(get_config(model, trust_remote_code=False))
    ours = AutoConfig.from_pretrained(model).get_text_config()
    assert layers_of(theirs) == layers_of(ours)


@pytest.mark.parametrize(("total", "granule"), [(132, 8), (108, 2), (142, 2)])
def test_every_count_of_a_plan_leaves_another(model: Path, total: int, granule: int) -> None:
    made = planned(str(model), CONFIG, total, granule)
    assert {total - sms for sms in made.counts} == set(made.counts)
    assert min(made.counts) >= 4 and made.total_sms == total


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["lora", *map(str, arguments)], env={"COLUMNS": "200"})
    return done.exit_code, " ".join((done.stdout + done.stderr).split())


def test_a_dry_run_tells_plan_and_duration_without_a_gpu(model: Path) -> None:
    code, said = run(model, "--dry-run", "--total-sms", TOTAL, "--tokens", "64,8")
    assert code == 0 and "64 + 32 + 32" in said and "8, 64" in said
    made = planned(str(model), CONFIG, TOTAL)
    assert f"{len(made.counts)} counts of {TOTAL} SMs" in said
    assert f"about {made.guess_s / 60:.0f} minutes, at most 30" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "sees no CUDA device"),
        (("--dry-run",), "--total-sms"),
        (("--overlap", "half"), "give shrink or full"),
        (("--tokens", "8,x"), "give whole numbers"),
        (("--tokens", "0"), "above 0"),
    ],
)
def test_what_cannot_be_measured_ends_with_2(
    model: Path, arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LORA_ENABLE_DUAL_STREAM", "0")  # puts it back as it was
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code, told = run(model, *arguments)
    assert code == 2 and said in told


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    code, said = run(tmp_path, "--dry-run", "--total-sms", TOTAL)
    assert code == 2 and "no configuration of a model" in said
