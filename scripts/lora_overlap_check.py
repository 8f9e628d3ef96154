"""Base and LoRA layers one after the other, on vLLM's two streams, and in partitions, on this GPU.

    python scripts/lora_overlap_check.py MODEL --out DIR [--table TABLE]

First it checks the results, also those of a replayed graph: ``shrink`` gives the bits of the
sequential path, where that gives its own again (its kernel may add up in any order); all others
differ by a rounding. Then it times a decoder layer (its linear layers with LoRA) at each number of
tokens. Without a table it searches one, in half of the time.

Exit code 0: all results are right; 1: one is not; 2: nothing was measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from horizonserve import facts  # noqa: E402
from horizonserve.lora import table as tables  # noqa: E402
from horizonserve.lora.parallel import InTurn, Work, run  # noqa: E402
from horizonserve.lora.table import Adapters, Table  # noqa: E402
from horizonserve.profiling import lora as sweep  # noqa: E402
from horizonserve.spatial.driver import Device  # noqa: E402

#: Runs of the sequential path that show whether its bits come again.
AGAIN = 5
Each = Callable[[Any, Work[Any, Any]], Any]


def ways(machine: sweep.Gpu, table: Table, tokens: int) -> dict[str, Each]:
    """How a layer may run, by name."""
    import torch
    from vllm.utils.multi_stream_utils import maybe_execute_in_parallel

    aux, events = torch.cuda.Stream(), (torch.cuda.Event(), torch.cuda.Event())

    def sequential(_kind: Any, parts: Work[Any, Any]) -> Any:
        return run(InTurn(), "shrink", parts)

    def two_streams(_kind: Any, parts: Work[Any, Any]) -> Any:
        def lora() -> Any:
            delta = parts.zeros()
            parts.expand(delta, parts.shrink())
            return delta

        output, delta = maybe_execute_in_parallel(parts.base, lora, *events, aux)
        return output.add_(delta)

    def partitions(overlap: Any) -> Each:
        def each(kind: Any, parts: Work[Any, Any]) -> Any:
            pair = table.pair(kind, tokens)
            if pair is None:
                return sequential(kind, parts)
            return run(machine.fork(pair), overlap, parts)

        return each

    return {
        "sequential": sequential,
        "two streams": two_streams,
        "partitions, shrink": partitions("shrink"),
        "partitions, full": partitions("full"),
    }


def wrong(machine: sweep.Gpu, table: Table, tokens: int) -> list[str]:
    """Results that differ from the sequential path by more than they may."""
    import torch

    found = []
    machine.assign(tokens, bare=True)
    made = ways(machine, table, tokens)
    for kind in table.layers:
        parts = machine.work(kind, tokens, 0)
        expected, base = made["sequential"](kind, parts), parts.base()
        delta = (expected - base).abs()
        # A sum's own rounding, and that of what it is a sum of.
        room = 2 * torch.finfo(base.dtype).eps * (base.abs() + delta + delta.max())
        again = (made["sequential"](kind, parts) for _ in range(AGAIN))
        reproducible = all(torch.equal(output, expected) for output in again)
        for name, each in made.items():
            outputs = {"eager": each(kind, parts)}
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs["graph"] = each(kind, parts)
            graph.replay()
            torch.cuda.synchronize()
            for how, output in outputs.items():
                exact = reproducible and name in ("sequential", "partitions, shrink")
                same = (
                    torch.equal(output, expected)
                    if exact
                    else bool(((output - expected).abs() <= room).all())
                )
                if not same:
                    most = float((output - expected).abs().max())
                    found.append(f"{name}, {kind}, {tokens} tokens, {how}: off by {most:g}")
    return found


def check(arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """The report, and whether every result is right.

    Raises:
        ValueError: no GPU, or the model or the table cannot be used.
        RuntimeError: a driver call failed.
    """
    until_s = time.monotonic() + arguments.limit_s
    sweep.require_cuda()
    named, layers = sweep.read_model(arguments.model)
    device, platform = Device(), facts.platform()
    table = tables.load(arguments.table) if arguments.table else None
    config = sweep.LoraConfig(
        adapters=table.adapters
        if table
        else Adapters(max_loras=arguments.max_loras, max_rank=arguments.max_lora_rank),
        tokens=tuple(arguments.tokens),
        budget_s=arguments.limit_s / 2,
    )
    if table and (different := table.mismatches(platform, named)):
        raise ValueError(f"{arguments.table}: {'; '.join(different)}")
    total = device.die.total_sms
    plan = sweep.Plan(layers, config.tokens, sweep.counts(device.levels()), total)
    pairs = [(sms, total - sms) for sms in plan.counts]
    machine = sweep.Gpu(layers, config, named.dtype or "bfloat16", device, pairs)
    if table is None:
        empty = sweep.empty_table(named, layers, config)
        table, _ = sweep.fill(
            empty,
            plan,
            machine,
            config.budget_s,
            lambda now: tables.save(now, arguments.out / "table.lora.yaml"),
            print,
        )
    errors, rows = [], []
    for tokens in config.tokens:
        if time.monotonic() >= until_s:
            break
        errors += wrong(machine, table, tokens)
        took = {
            name: machine.layer_s(tokens, each) * 1e6
            for name, each in ways(machine, table, tokens).items()
        }
        pairs_here = {kind: table.pair(kind, tokens) for kind in table.layers}
        rows.append({"tokens": tokens, "layer_us": took, "base_and_lora_sms": pairs_here})
    report = {
        "kind": facts.kind(platform),
        "model": named.model_dump(),
        "adapters": config.adapters.model_dump(),
        "versions": facts.versions().model_dump(),
        "replays": sweep.REPLAYS,
        "errors": errors,
        "rows": rows,
    }
    return report, not errors


def show(report: dict[str, Any]) -> None:
    """Print the times as a table."""
    from rich.console import Console
    from rich.table import Table as Grid

    rows = report["rows"]
    names = list(rows[0]["layer_us"]) if rows else []
    title = f"{report['kind']}: a decoder layer without attention, us"
    grid = Grid("tokens", *names, title=title)
    for row in rows:
        base_us = row["layer_us"]["sequential"]
        cells = [f"{us:.1f} ({us / base_us - 1:+.1%})" for us in row["layer_us"].values()]
        grid.add_row(str(row["tokens"]), *cells)
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(grid)
    for error in report["errors"]:
        console.print(f"wrong: {error}", highlight=False, markup=False)


def main(argv: Sequence[str] | None = None) -> int:
    """0: all results are right; 1: one is not; 2: nothing was measured."""
    parser = argparse.ArgumentParser(prog="lora_overlap_check", description=__doc__)
    add = parser.add_argument
    add("model", help="directory or name of a model; only its configuration is read")
    add("--out", type=Path, required=True, help="gets lora_overlap.json")
    add("--table", type=Path, help="of horizon-profile lora; without it one is searched")
    add("--tokens", type=int, nargs="+", default=list(sweep.TOKENS))
    add("--max-loras", type=int, default=4)
    add("--max-lora-rank", type=int, default=16)
    add("--limit-s", type=float, default=540, help="of everything (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        report, right = check(arguments)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"lora_overlap_check: {error}", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "lora_overlap.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    print(path)
    return 0 if right and report["rows"] else 1 if report["rows"] else 2


if __name__ == "__main__":
    sys.exit(main())
