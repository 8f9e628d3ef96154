"""vLLM's own LoRA layers, run as a table says; and where they refuse to."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "spatial" / "fakes"))

from fake_driver import compiled, skip_beside_a_real  # noqa: E402

from horizonserve.config import load
from horizonserve.lora.parallel import InTurn
from horizonserve.lora.table import Adapters, Row, Shape, Table, save
from horizonserve.profile import Model, Platform, Versions

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from horizonserve.serving import compat, launch, lora_overlap  # noqa: E402
from horizonserve.serving.lora_overlap import ENV_DUAL_STREAM, LoraLayers, unmet  # noqa: E402

HIDDEN, HEADS, KV_HEADS, WIDTH, INNER, RANK = 64, 4, 2, 16, 96, 8
CUDA = "libcuda.so.1"
#: The CPU kernels take a token without an adapter for one with the last: that one stays zero.
ADAPTERS = 3
NONE = ADAPTERS - 1
SHAPES = {
    "qkv": Shape(inputs=HIDDEN, outputs=(HEADS + 2 * KV_HEADS) * WIDTH),
    "o": Shape(inputs=HEADS * WIDTH, outputs=HIDDEN),
    "gate_up": Shape(inputs=HIDDEN, outputs=2 * INNER),
    "down": Shape(inputs=INNER, outputs=HIDDEN),
}
#: Of the tokens of a batch, as slots of the kernels.
MIXED = (0, 1, -1, -1, 0, 1, 1)
PAIR = (96, 36)


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """vLLM's LoRA layers of one decoder layer with random weights, by kind."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.lora import LoRAConfig
    from vllm.distributed import parallel_state
    from vllm.lora.layers import column_parallel_linear as columns
    from vllm.lora.layers.row_parallel_linear import RowParallelLinearWithLoRA
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.model_executor.layers import linear

    rendezvous = tmp_path_factory.mktemp("group") / "file"
    torch.manual_seed(1)
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        of = {"bias": False, "params_dtype": torch.bfloat16}
        base = {
            "qkv": linear.QKVParallelLinear(
                HIDDEN, WIDTH, HEADS, KV_HEADS, prefix="model.layers.0.self_attn.qkv_proj", **of
            ),
            "o": linear.RowParallelLinear(
                HEADS * WIDTH, HIDDEN, prefix="model.layers.0.self_attn.o_proj", **of
            ),
            "gate_up": linear.MergedColumnParallelLinear(
                HIDDEN, [INNER, INNER], prefix="model.layers.0.mlp.gate_up_proj", **of
            ),
            "down": linear.RowParallelLinear(
                INNER, HIDDEN, prefix="model.layers.0.mlp.down_proj", **of
            ),
        }
        wrap = {
            "qkv": columns.MergedQKVParallelLinearWithLoRA,
            "o": RowParallelLinearWithLoRA,
            "gate_up": columns.MergedColumnParallelLinearWithLoRA,
            "down": RowParallelLinearWithLoRA,
        }
        config = LoRAConfig(max_loras=ADAPTERS, max_lora_rank=RANK)
        config.lora_dtype = torch.bfloat16
        punica = PunicaWrapperCPU(64, 64, "cpu")
        made = {}
        for kind, layer in base.items():
            layer.weight.data.normal_()
            layer.quant_method.process_weights_after_loading(layer)
            made[kind] = with_lora = wrap[kind](layer)
            with_lora.create_lora_weights(ADAPTERS, config)
            for stack in (*with_lora.lora_a_stacked, *with_lora.lora_b_stacked):
                stack[:NONE].normal_()
            with_lora.set_mapping(punica)
        try:
            yield made
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def batch(layer: Any, adapters: tuple[int, ...], decode: bool = False) -> Any:
    """An input with these tokens, which the kernels know the adapters of."""
    import torch
    from vllm.lora.layers import LoRAMapping

    ids = tuple(adapter + 1 for adapter in adapters)
    mapping = LoRAMapping(ids, ids, is_prefill=not decode)
    slots = [number + 1 for number in range(NONE)] + [None]
    layer.punica_wrapper.update_metadata(mapping, slots, ADAPTERS, 128)
    return torch.randn(len(adapters), layer.input_size, dtype=torch.bfloat16)


def table(*tokens: int, **changes: Any) -> Table:
    content: dict[str, Any] = {
        "kind": "made up",
        "platform": Platform(device="GPU", units=sum(PAIR)),
        "model": Model(name="m"),
        "adapters": Adapters(max_loras=ADAPTERS, max_rank=RANK),
        "overlap": "shrink",
        "versions": Versions(horizonserve="1", vllm="0.30.0"),
        "date": datetime.date(2026, 1, 2),
        "layers": SHAPES,
        "rows": [
            Row(
                layer=kind,
                tokens=count,
                sequential_ms=1.0,
                base_sms=PAIR[0],
                lora_sms=PAIR[1],
                overlapped_ms=0.9,
            )
            for kind in SHAPES
            for count in tokens
        ],
    }
    return Table.model_validate(content | changes)


class Counted(InTurn):
    """Counts its forks."""

    def __init__(self) -> None:
        self.forks = 0

    def both(self, base: Callable[[], Any], lora: Callable[[], Any], /) -> tuple[Any, Any]:
        self.forks += 1
        return super().both(base, lora)


def overlapped(
    overlap: Any = "shrink", capturing: bool = True, **changes: Any
) -> tuple[LoraLayers, Counted]:
    fork = Counted()
    made = table(len(MIXED), 1, **changes)
    return LoraLayers(made, {PAIR: fork}, overlap, lambda: capturing), fork


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("adapters", [MIXED, (-1,) * len(MIXED), (1,), (-1,)])
def test_shrink_gives_the_bits_of_vllms_sequential_path(
    layers, kind: str, adapters: tuple[int, ...], decode: bool
) -> None:
    import torch

    layer = layers[kind]
    x = batch(layer, adapters, decode)
    ours, fork = overlapped("shrink")
    output = ours.apply(layer, x)
    assert fork.forks == 1
    assert torch.equal(output, layer._apply_sync(x))
    # Not by chance: the adapters do something.
    without = layer._get_quant_method().apply(layer.base_layer, x, None)
    changed = (output != without).any(dim=1).tolist()
    assert changed == [adapter >= 0 for adapter in adapters]


@pytest.mark.parametrize("kind", SHAPES)
def test_full_differs_by_a_rounding(layers, kind: str) -> None:
    import torch

    layer = layers[kind]
    x = batch(layer, MIXED)
    ours, _ = overlapped("full")
    output, sequential = ours.apply(layer, x), layer._apply_sync(x)
    without = layer._get_quant_method().apply(layer.base_layer, x, None)
    step = torch.finfo(output.dtype).eps
    largest = without.abs() + (sequential - without).abs()
    assert ((output - sequential).abs() <= 2 * step * largest).all()
    assert torch.equal(output[torch.tensor(MIXED) < 0], without[torch.tensor(MIXED) < 0])


@pytest.mark.parametrize("overlap", ["shrink", "full"])
def test_a_batch_dimension_is_kept(layers, overlap: str) -> None:
    import torch

    layer = layers["gate_up"]
    x = batch(layer, MIXED)
    ours, fork = overlapped(overlap)
    flat, deep = ours.apply(layer, x), ours.apply(layer, x.unsqueeze(0))
    assert fork.forks == 2 and deep.shape == (1, *flat.shape)
    assert torch.equal(deep[0], flat)


def test_only_what_is_captured_forks_but_each_size_once_before(layers) -> None:
    import torch

    layer = layers["o"]
    ours, fork = overlapped(capturing=False)
    x = batch(layer, MIXED)
    outputs = [ours.apply(layer, x) for _ in range(3)]
    assert fork.forks == 1
    ours.apply(layer, batch(layer, (0,)))
    assert fork.forks == 2
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_what_the_table_does_not_have_runs_one_after_the_other(layers) -> None:
    ours, fork = overlapped()
    ours.apply(layers["o"], batch(layers["o"], (0, 1)))
    assert fork.forks == 0
    # Another part of the model, with a layer of the same name.
    other, fork = overlapped(layers=SHAPES | {"o": Shape(inputs=HIDDEN, outputs=2 * HIDDEN)})
    other.apply(layers["o"], batch(layers["o"], MIXED))
    assert fork.forks == 0
    layers["o"].base_layer.prefix, kept = "model.visual.fc1", layers["o"].base_layer.prefix
    try:
        ours, fork = overlapped()
        ours.apply(layers["o"], batch(layers["o"], MIXED))
        assert fork.forks == 0
    finally:
        layers["o"].base_layer.prefix = kept


CAN = {"fully_sharded": False, "ranks": 1, "eager": False, "cuda": True}


@pytest.mark.parametrize(
    ("differently", "said"),
    [
        ({"cuda": False}, "NVIDIA GPU"),
        ({"ranks": 2}, "--tensor-parallel-size"),
        ({"fully_sharded": True}, "--fully-sharded-loras"),
        ({"eager": True}, "--enforce-eager"),
    ],
)
def test_each_condition_has_its_reason(differently: dict[str, Any], said: str) -> None:
    assert unmet(**CAN) is None
    why = unmet(**CAN | differently)
    assert why is not None and said in why and "remove it" in why


def arguments(**changes: Any) -> SimpleNamespace:
    stock = {
        "enable_lora": True,
        "fully_sharded_loras": False,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "enforce_eager": False,
        "max_loras": ADAPTERS,
        "max_lora_rank": RANK,
    }
    return SimpleNamespace(**stock | changes)


def test_the_launch_refuses_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV_DUAL_STREAM, raising=False)
    path = tmp_path / "table.yaml"
    settings, _ = load(environ={"HORIZON_LORA_TABLE": str(path)})
    with pytest.raises(SystemExit, match="give --enable-lora") as caught:
        lora_overlap.prepare(arguments(enable_lora=False), settings)
    assert str(caught.value).startswith(f"horizonserve: lora_table='{path}': ")
    # This machine has none.
    with pytest.raises(SystemExit, match="NVIDIA GPU"):
        lora_overlap.prepare(arguments(), settings)
    assert ENV_DUAL_STREAM not in lora_overlap.os.environ


def test_the_launch_asks_for_two_streams_where_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setenv(ENV_DUAL_STREAM, "0")
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _self: True)
    path = tmp_path / "table.yaml"
    settings, _ = load(environ={"HORIZON_LORA_TABLE": str(path)})
    with pytest.raises(SystemExit, match="cannot be read"):
        lora_overlap.prepare(arguments(), settings)
    save(table(8), path)
    versions = lora_overlap.facts.versions()
    with pytest.raises(SystemExit, match="adapters.max_loras is 9 here"):
        lora_overlap.prepare(arguments(max_loras=9), settings)
    save(table(8, versions=versions), path)
    # Imported in this process, with one stream.
    import vllm.lora.layers  # noqa: F401

    with pytest.raises(SystemExit, match=f"set {ENV_DUAL_STREAM}=1"):
        lora_overlap.prepare(arguments(), settings)
    monkeypatch.delitem(lora_overlap.sys.modules, "vllm.lora.layers.base_linear")
    lora_overlap.prepare(arguments(), settings)
    assert lora_overlap.os.environ[ENV_DUAL_STREAM] == "1"


def test_an_omni_server_is_told_that_it_is_not_for_it(tmp_path: Path) -> None:
    settings, _ = load(environ={"HORIZON_LORA_TABLE": str(tmp_path)})
    with pytest.raises(SystemExit, match="vllm serve only"):
        launch._enable_omni(arguments(), settings)


@pytest.mark.parametrize("lora_config", [None, "some"])
def test_a_worker_that_cannot_says_so_once_and_serves_without(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    vllm_log: pytest.LogCaptureFixture,
    lora_config: str | None,
) -> None:
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    stock = BaseLinearLayerWithLoRA._apply_async_impl
    monkeypatch.setattr(BaseLinearLayerWithLoRA, "_apply_async_impl", stock)
    monkeypatch.setenv("HORIZON_LORA_TABLE", str(tmp_path / "none.yaml"))
    lora = SimpleNamespace(fully_sharded_loras=False, max_loras=ADAPTERS, max_lora_rank=RANK)
    config = SimpleNamespace(
        lora_config=lora_config and lora,
        parallel_config=SimpleNamespace(world_size=1, use_ubatching=False),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL),
    )
    worker = SimpleNamespace(vllm_config=config, device=torch.device("cpu"))
    lora_overlap.attach(worker)
    said = [
        one.getMessage() for one in vllm_log.records if "one after the other" in one.getMessage()
    ]
    if lora_config is None:
        assert said == [] and BaseLinearLayerWithLoRA._apply_async_impl is stock
        return
    assert len(said) == 1 and "NVIDIA GPU" in said[0] and "none.yaml" in said[0]
    assert BaseLinearLayerWithLoRA._apply_async_impl is BaseLinearLayerWithLoRA._apply_sync


def test_every_size_of_the_table_is_warm_before_the_cache_is_sized() -> None:
    seen: list[tuple[int, dict[str, Any]]] = []

    class Runner:
        def _dummy_run(self, tokens: int, **kwargs: Any) -> int:
            seen.append((tokens, kwargs))
            return tokens

        def profile_run(self) -> None:
            assert self._dummy_run(64, is_profile=True) == 64

    runner = Runner()
    lora_overlap._warm_in_profile(runner, table(8, 32, 512), 4)
    runner.profile_run()
    warm = {"is_profile": True, "num_active_loras": 4}
    assert seen == [(64, {"is_profile": True}), (8, warm), (32, warm)]
    runner._dummy_run(64)
    assert len(seen) == 4


def of_the_child(*pairs: tuple[int, int], **changes: Any) -> Table:
    found = [
        Row(
            layer="o",
            tokens=8 * number,
            sequential_ms=1.0,
            base_sms=base,
            lora_sms=lora,
            overlapped_ms=0.9,
        )
        for number, (base, lora) in enumerate(pairs, 1)
    ]
    return table(
        platform=Platform(device="fake device", units=132),
        model=Model(name="m", architecture="A", hidden_size=64, layers=2, dtype="bfloat16"),
        versions=lora_overlap.facts.versions(),
        layers={"o": Shape(inputs=4, outputs=4)},
        rows=found,
        **changes,
    )


def test_a_worker_gets_its_partitions_or_goes_on_without(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings")
    skip_beside_a_real(CUDA)
    library, log = compiled("libcuda.c", CUDA, tmp_path), tmp_path / "log"
    good = {"ARCHITECTURE": "A", ENV_DUAL_STREAM: "1"}
    cases: list[tuple[Table, dict[str, str], str]] = [
        (of_the_child((96, 36)), good, "shrink"),
        (of_the_child((98, 34)), good, "98 SMs to the base layer"),
        (of_the_child((96, 36)), good | {"ARCHITECTURE": "B"}, "model.architecture is 'B' here"),
        (of_the_child((96, 36), overlap="full"), good, "lora_overlap is 'shrink' here"),
        (of_the_child((96, 36)), good | {ENV_DUAL_STREAM: "0"}, "was not set when"),
    ]
    environments = []
    for number, (made, environment, _) in enumerate(cases):
        path = tmp_path / f"{number}.yaml"
        save(made, path)
        environments.append(environment | {"HORIZON_LORA_TABLE": str(path)})
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("lora_child.py")),
            json.dumps(environments),
        ],
        env=os.environ
        | {
            "LD_LIBRARY_PATH": str(library.parent),
            "CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING": "1",
            "FAKE_LOG": str(log),
            ENV_DUAL_STREAM: "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    # vLLM logs to the same place.
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    first, *others = said
    # Eight tokens fork, sixteen are not in the table.
    assert first["ran"] == ["base", "shrink", "expand", "all"]
    assert first["outside"] == [False, False, True, True] and first["different"] == 3
    assert first["profiles"] and not first["sequential"]
    assert [(len(one["logged"]), one["sequential"], one["profiles"]) for one in others] == [
        (1, True, False)
    ] * (len(cases) - 1)
    for one, (_, _, why) in zip(said, cases, strict=True):
        assert why in one["logged"][-1]
    lines = log.read_text().splitlines()
    assert lines.count("context") == 2 and "-context" not in lines


def test_the_supported_version_has_every_name() -> None:
    compat.require(compat.LORA_OVERLAP)
