"""`horizon-profile lora`: which SMs base and LoRA layers get when they run side by side (HALO 4.2).

For every kind of layer and number of tokens:

    alone     the base layer and the LoRA layer by themselves, under every count of SMs
    step      a decoder layer's four linear layers with LoRA, one of them side by side
    search    from both, few of the steps (lora/search.py); a row of the table (lora/table.py)

The layers have random weights in the model's shapes; they are torch's matrix product and vLLM's
LoRA kernels, captured in CUDA graphs as in a server. Attention and norms are left out: they take as
long either way. So are all-reduces: the table is for one GPU.

Base and LoRA layer have the two sides of one split, so a step with so many SMs for the base layer
leaves the LoRA layer all others; the search's count for it is the fewest that it needs.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, Protocol

from horizonserve import facts, profile
from horizonserve.lora import search
from horizonserve.lora.parallel import GreenFork, InTurn, Overlap, Pair, Work, forks, run, splits
from horizonserve.lora.table import KINDS, Adapters, Kind, Row, Shape, Table, kept, save
from horizonserve.spatial.driver import Device, DriverError
from horizonserve.spatial.ladder import Die, Level, aligned, existing

#: Replays of which the median counts, and such that come before.
REPLAYS: Final = 20
_WARM: Final = 3
#: Layers with weights of their own in a step, so that no weight is read from the L2 cache.
_MOST_COPIES: Final = 16
#: Guesses for the plan: a curve's point, a step's point, and how many of these a search needs.
POINT_GUESS_S: Final = 0.05
STEP_GUESS_S: Final = 0.2
STEPS_GUESS: Final = 8
#: What vLLM captures by default, thinned out.
TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 384)


@dataclass(frozen=True, slots=True)
class Layer:
    """A base layer: its inputs, and the outputs of each part that has an adapter of its own."""

    inputs: int
    slices: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        return Shape(inputs=self.inputs, outputs=sum(self.slices))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Everything that decides the measurement."""

    adapters: Adapters
    tokens: tuple[int, ...] = TOKENS
    overlap: Overlap = "shrink"
    budget_s: float = 1_800.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Every layer and number of tokens, and every count of SMs that a side can have."""

    layers: Mapping[Kind, Layer]
    tokens: tuple[int, ...]
    counts: tuple[int, ...]
    total_sms: int

    @property
    def keys(self) -> list[tuple[Kind, int]]:
        return [(kind, tokens) for kind in self.layers for tokens in self.tokens]

    @property
    def guess_s(self) -> float:
        """About how long it takes, in seconds."""
        per_key = 2 * len(self.counts) * POINT_GUESS_S + STEPS_GUESS * STEP_GUESS_S
        return len(self.keys) * per_key


def counts(levels: Iterable[Level]) -> tuple[int, ...]:
    """SMs that a side of some split has, rising."""
    return tuple(sorted({base_sms for base_sms, _ in splits(levels)}))


def layers_of(config: Any) -> dict[Kind, Layer]:
    """The linear layers of a decoder layer.

    Args:
        config: of the text model, as transformers reads it.

    Raises:
        ValueError: it has other layers, such as experts.
    """
    needed = ("hidden_size", "num_attention_heads", "intermediate_size")
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    wrong = [f"no {name}" for name in needed if not getattr(config, name, None)]
    wrong += [name for name in experts if getattr(config, name, None)]
    if wrong:
        raise ValueError(
            f"{type(config).__name__} has {', '.join(wrong)}: only decoders with attention and a"
            " dense MLP can be measured"
        )
    hidden, heads = config.hidden_size, config.num_attention_heads
    width = getattr(config, "head_dim", None) or hidden // heads
    kv = (getattr(config, "num_key_value_heads", None) or heads) * width
    inner = config.intermediate_size
    return {
        "qkv": Layer(hidden, (heads * width, kv, kv)),
        "o": Layer(heads * width, (hidden,)),
        "gate_up": Layer(hidden, (inner, inner)),
        "down": Layer(inner, (hidden,)),
    }


def read_model(model: str) -> tuple[profile.Model, dict[Kind, Layer]]:
    """A model as a table names it, and its layers.

    Raises:
        ValueError: no such model, or one that cannot be measured.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"{model}: no configuration of a model ({error})") from error
    text = config.get_text_config()
    dtype = str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
    named = profile.Model(
        name=Path(model).name,
        architecture=(config.architectures or [None])[0],
        hidden_size=getattr(text, "hidden_size", None),
        layers=getattr(text, "num_hidden_layers", None),
        # As vLLM does: its LoRA kernels have no 32 bits.
        dtype="bfloat16" if dtype == "float32" else dtype,
    )
    return named, layers_of(text)


def planned(
    model: str, config: LoraConfig, total_sms: int | None = None, granule_sms: int = 8
) -> Plan:
    """What would be measured: on this machine's GPU, or on one with so many SMs.

    Raises:
        ValueError: the model cannot be measured, or there is no such GPU.
    """
    _, layers = read_model(model)
    if total_sms is not None:
        # Groups of less than 4 SMs exist on no GPU with alignment 2 or more.
        die = Die(total_sms, max(granule_sms, 4), granule_sms)
        return Plan(layers, config.tokens, counts(existing(die, aligned(die))), total_sms)
    try:
        device = Device()
    except DriverError as error:
        raise ValueError(f"{error}; without a GPU, give --total-sms and --granule") from error
    return Plan(layers, config.tokens, counts(device.levels()), device.die.total_sms)


class Machine(Protocol):
    """What takes the times, in seconds."""

    def alone_s(self, kind: Kind, tokens: int, part: str, sms: int) -> float:
        """The ``base`` or ``lora`` layer by itself on so many SMs."""
        ...

    def step_s(self, kind: Kind, tokens: int, pair: Pair | None) -> float:
        """A decoder layer; the layers of the kind side by side, or with None nothing."""
        ...


def row(machine: Machine, plan: Plan, kind: Kind, tokens: int) -> Row:
    """Search one row of the table."""
    base_s = {sms: machine.alone_s(kind, tokens, "base", sms) for sms in plan.counts}
    lora_s = {sms: machine.alone_s(kind, tokens, "lora", sms) for sms in plan.counts}
    sequential_s = machine.step_s(kind, tokens, None)
    known: dict[int, float] = {}

    def step_s(base_sms: int, _fewest_lora_sms: int) -> float:
        if base_sms not in known:
            pair = base_sms, plan.total_sms - base_sms
            known[base_sms] = machine.step_s(kind, tokens, pair)
        return known[base_sms]

    best = search.search(base_s, lora_s, step_s, sequential_s, plan.total_sms)
    found = Row(layer=kind, tokens=tokens, sequential_ms=sequential_s * 1e3)
    if best is None:
        return found
    return found.model_copy(
        update={
            "base_sms": best.base_sms,
            "lora_sms": plan.total_sms - best.base_sms,
            "overlapped_ms": best.step_s * 1e3,
        }
    )


def fill(
    table: Table,
    plan: Plan,
    machine: Machine,
    budget_s: float,
    keep: Callable[[Table], None],
    say: Callable[[str], None] = lambda _words: None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Table, str]:
    """Search the rows that the table lacks, keeping it after each.

    Returns the table, and why it is not complete; empty when it is.
    """
    began_s = clock()
    there = {(one.layer, one.tokens) for one in table.rows}
    for kind, tokens in plan.keys:
        if (kind, tokens) in there:
            continue
        if clock() - began_s >= budget_s:
            return table, "the budget ended before all rows"
        say(f"{kind}, {tokens} tokens")
        table = table.with_row(row(machine, plan, kind, tokens))
        keep(table)
    return table, ""


def measure(
    model: str, config: LoraConfig, out: Path, say: Callable[[str], None]
) -> tuple[Path, Table, str]:
    """Measure a model on this machine's first GPU; the same call goes on from what is there.

    Returns the file, its table, and why it is not complete; empty when it is.

    Raises:
        ValueError: the model cannot be measured, or there is no CUDA device.
        RuntimeError: a driver call failed.
    """
    require_cuda()
    named, layers = read_model(model)
    device = Device()
    plan = Plan(layers, config.tokens, counts(device.levels()), device.die.total_sms)
    empty = empty_table(named, layers, config)
    where = profile.place(out, empty.platform, named)
    path = where.with_name(f"{where.stem}.lora.yaml")
    pairs = [(sms, plan.total_sms - sms) for sms in plan.counts]
    machine = Gpu(layers, config, named.dtype or "bfloat16", device, pairs)
    table, why = fill(
        kept(path, empty), plan, machine, config.budget_s, lambda now: save(now, path), say
    )
    return path, table, why


def empty_table(model: profile.Model, layers: Mapping[Kind, Layer], config: LoraConfig) -> Table:
    """The table of a model on this machine, without rows."""
    platform = facts.platform()
    return Table(
        kind=facts.kind(platform),
        platform=platform,
        model=model,
        adapters=config.adapters,
        overlap=config.overlap,
        versions=facts.versions(),
        date=datetime.date.today(),
        layers={kind: layer.shape for kind, layer in layers.items()},
    )


def require_cuda() -> None:
    """Check that torch sees a GPU, and have vLLM's LoRA kernels be as with two streams.

    Raises:
        ValueError: there is none; the message says what to do without.
    """
    # Before vLLM's LoRA layers are imported, as in a server.
    os.environ["VLLM_LORA_ENABLE_DUAL_STREAM"] = "1"
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            f"torch {torch.__version__} sees no CUDA device: base and LoRA layers can only be"
            " measured on a GPU; `horizon-profile lora --dry-run` prints the plan without one"
        )


class Gpu:
    """The layers of a model on a GPU, every time a median over replays of a CUDA graph."""

    def __init__(
        self,
        layers: Mapping[Kind, Layer],
        config: LoraConfig,
        dtype: str,
        device: Device,
        pairs: Sequence[Pair],
    ) -> None:
        """Make weights and partitions; takes the memory of a few decoder layers.

        Args:
            layers: of a decoder layer.
            config: which adapters, and what runs side by side.
            dtype: of all weights, ``bfloat16`` or ``float16``.
            device: the first GPU.
            pairs: every partition that is to be measured.
        """
        import torch
        from vllm.config.lora import LoRAConfig
        from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

        from horizonserve.serving.lora_overlap import work
        from horizonserve.spatial.torch_streams import TorchStreams

        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")  # makes the primary context
        self._torch, self._work = torch, work
        self._overlap = config.overlap
        self._forks = forks(device, pairs, TorchStreams(0))
        self._by_sms = {pair[0]: fork for pair, fork in self._forks.items()}
        self._layers = layers
        most, adapters = max(config.tokens), config.adapters
        lora = LoRAConfig(max_loras=adapters.max_loras, max_lora_rank=adapters.max_rank)
        self._loras = adapters.max_loras
        self._punica = PunicaWrapperGPU(most, most, "cuda", lora_config=lora)
        of = {"device": "cuda", "dtype": getattr(torch, dtype)}
        smallest = min(layer.inputs * sum(layer.slices) for layer in layers.values()) * 2
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        self._copies = range(min(_MOST_COPIES, -(-2 * cache // smallest)))

        def random(*shape: int) -> Any:
            return torch.randn(shape, **of) * shape[-1] ** -0.5

        def stacks(layer: Layer) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            count, rank = adapters.max_loras, adapters.max_rank
            return (
                tuple(random(count, 1, rank, layer.inputs) for _ in layer.slices),
                tuple(random(count, 1, outputs, rank) for outputs in layer.slices),
            )

        self._x = {kind: random(most, layer.inputs) for kind, layer in layers.items()}
        self._weights = {
            kind: [(random(sum(layer.slices), layer.inputs), *stacks(layer)) for _ in self._copies]
            for kind, layer in layers.items()
        }

    def work(self, kind: Kind, tokens: int, copy: int) -> Work[Any, Any]:
        """One layer of the kind, with weights of its own for each copy."""
        weight, lora_a, lora_b = self._weights[kind][copy]
        x = self._x[kind][:tokens]
        slices = self._layers[kind].slices
        linear = self._torch.nn.functional.linear
        return self._work(lambda: linear(x, weight), x, lora_a, lora_b, slices, self._punica)

    def alone_s(self, kind: Kind, tokens: int, part: str, sms: int) -> float:
        """See `Machine`. The other side of the split is idle."""
        self.assign(tokens)
        works = [self.work(kind, tokens, copy) for copy in self._copies]

        def base() -> None:
            for one in works:
                one.base()

        def lora() -> None:
            for one in works:
                shrunk = one.shrink()
                if self._overlap == "full":
                    one.expand(one.zeros(), shrunk)

        fork, what = self._by_sms[sms], base if part == "base" else lora
        return self.timed_s(lambda: fork.both(what, lambda: None)) / len(works)

    def step_s(self, kind: Kind, tokens: int, pair: Pair | None) -> float:
        """See `Machine`."""

        def each(one: Kind, parts: Work[Any, Any]) -> None:
            if pair is not None and one == kind:
                run(self.fork(pair), self._overlap, parts)
            else:
                run(InTurn(), "shrink", parts)

        return self.layer_s(tokens, each)

    def layer_s(self, tokens: int, each: Callable[[Kind, Work[Any, Any]], object]) -> float:
        """Seconds of a decoder layer of which ``each`` runs every linear layer."""
        self.assign(tokens)
        works = [(kind, self.work(kind, tokens, copy)) for copy in self._copies for kind in KINDS]

        def step() -> None:
            for kind, parts in works:
                each(kind, parts)

        return self.timed_s(step) / len(self._copies)

    def assign(self, tokens: int, bare: bool = False) -> None:
        """Give every token an adapter, in turns; with ``bare``, every third has none."""
        turns = self._torch.arange(tokens, dtype=self._torch.int32, device="cuda") % self._loras
        if bare:
            turns[::3] = -1
        self._punica.token_mapping_meta.prepare_tensors(turns)

    def fork(self, pair: Pair) -> GreenFork:
        """The partition of a pair that was made."""
        return self._forks[pair]

    def timed_s(self, launch: Callable[[], object]) -> float:
        """Median seconds of what ``launch`` launches, captured and replayed."""
        cuda = self._torch.cuda
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            for _ in range(_WARM):
                launch()
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            launch()
        begins, ends = (
            [cuda.Event(enable_timing=True) for _ in range(_WARM + REPLAYS)] for _ in range(2)
        )
        for begin, end in zip(begins, ends, strict=True):
            begin.record()
            graph.replay()
            end.record()
        cuda.synchronize()
        pairs = zip(begins[_WARM:], ends[_WARM:], strict=True)
        return median(float(begin.elapsed_time(end)) for begin, end in pairs) / 1e3
