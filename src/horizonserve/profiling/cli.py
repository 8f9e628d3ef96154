"""The ``horizon-profile`` command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from horizonserve.bench.live import LiveError
from horizonserve.bench.server import ServerError
from horizonserve.lora.table import Adapters
from horizonserve.lora.table import Table as LoraTable
from horizonserve.profile import Profile, ProfileError
from horizonserve.profiling import lora as sweep
from horizonserve.profiling.plan import Grid
from horizonserve.profiling.samples import SamplesError
from horizonserve.slo import RequestClass

app = typer.Typer(
    name="horizon-profile",
    help="Measure what a model takes on this machine, once; servers then run by it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3_600.0}
#: Guesses, for the plan that --dry-run prints.
LEVEL_GUESS_S = 30.0
_REQUEST_GUESS_S = {"text": 0.5, "audio": 5.0, "image": 30.0}


def seconds(text: str) -> float:
    """``90s``, ``15m`` or ``1h`` in seconds.

    Raises:
        typer.BadParameter: it is none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not found or not float(found[1]):
        raise typer.BadParameter(f"{text!r}: write a number above 0 and s, m or h, such as 15m")
    return float(found[1]) * _UNITS_S[found[2]]


def classes(text: str) -> tuple[RequestClass, ...]:
    """``t2t,t2a`` as classes.

    Raises:
        typer.BadParameter: one of them does not exist.
    """
    try:
        return tuple(dict.fromkeys(RequestClass(name.strip()) for name in text.split(",")))
    except ValueError as error:
        known = ", ".join(RequestClass)
        raise typer.BadParameter(f"{text!r}: {error}; give some of {known}") from error


Budget = Annotated[str, typer.Option(help="Most time for the measurement: 90s, 15m, 1h.")]
Out = Annotated[Path, typer.Option(help="Where profiles are kept.")]
Deploy = Annotated[
    Path | None, typer.Option("--deploy-config", help="Deploy file, as for vllm-omni serve.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and how long it takes.")]
Model = Annotated[str | None, typer.Argument(help="Model to serve, as for vllm-omni serve.")]


@app.callback()
def main() -> None:
    """Measure what a model takes on this machine, once; servers then run by it."""


@app.command()
def slo(
    model: Model = None,
    url: Annotated[str | None, typer.Option(help="A server that runs, instead.")] = None,
    deploy: Deploy = None,
    only: Annotated[
        str | None, typer.Option("--classes", help="Some of them; without it all that it takes.")
    ] = None,
    budget: Budget = "30m",
    precision: Annotated[
        float,
        typer.Option(help="Half the width of a p95's interval, as a share of it.", min=0.01),
    ] = 0.25,
    multiple: Annotated[float, typer.Option(help="SLO = multiple x solo p95.", min=1.01)] = 5.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts and media.")] = 1,
    out: Out = Path("profiles"),
    dry_run: DryRun = False,
) -> None:
    """Run each class of the pipeline alone, at several sizes, and write the profile.

    Ctrl-C keeps what there is; the same command goes on. Exit code 0: complete, 1: partial,
    2: nothing measured.

    Example: horizon-profile slo MODEL --deploy-config deploy.yaml --budget 15m
    """
    from horizonserve.profiling.slo import SloConfig, measure_at, serve_and_measure

    config = SloConfig(
        classes=classes(only) if only else tuple(RequestClass),
        grid=Grid(),
        budget_s=seconds(budget),
        precision=precision,
        slo_multiple=multiple,
        seed=seed,
    )
    console = Console()
    if dry_run:
        measured = dict.fromkeys(cell.request_class for cell in config.plan)
        _show_plan(console, tuple(measured), config.grid, config.budget_s)
        return
    if (model is None) == (url is None):
        raise _fail("give either MODEL or --url")
    try:
        if url is not None:
            path, outcome = measure_at(url, config, out, console)
        else:
            path, outcome = serve_and_measure(str(model), deploy, config, out, console)
    except KeyboardInterrupt as interrupt:
        console.print(f"interrupted; the same command goes on from what is in {out}")
        raise typer.Exit(130) from interrupt
    except (ServerError, LiveError, SamplesError, ProfileError, OSError) as error:
        raise _fail(error) from error
    if outcome.profile.classes:
        show(console, outcome.profile)
        console.print(f"{path}", highlight=False)
    if not outcome.complete:
        console.print(f"partial: {outcome.why}", style="bold yellow", highlight=False, markup=False)
        raise typer.Exit(1 if outcome.profile.classes else 2)


@app.command()
def sm(
    model: Annotated[str, typer.Argument(help="Model to serve, as for vllm-omni serve.")],
    deploy: Deploy = None,
    backend: Annotated[
        str, typer.Option(help="green (a GPU under MPS), or cores (CPU cores instead of SMs).")
    ] = "green",
    rounds: Annotated[int, typer.Option(help="Measurements per level.", min=1)] = 5,
    tolerance: Annotated[
        float, typer.Option(help="S_cap's TPOT may exceed the best by this share.", min=0)
    ] = 0.03,
    budget: Budget = "30m",
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 1,
    out: Out = Path("profiles"),
    dry_run: DryRun = False,
) -> None:
    """Sweep fixed SM caps of the shared stage, alone and beside downstream work, and choose S_cap.

    Adds to the profile that `horizon-profile slo` wrote, and plots both curves.

    Example: horizon-profile sm MODEL --deploy-config deploy.yaml --backend cores
    """
    from horizonserve.profiling.sm import SmConfig
    from horizonserve.profiling.sm_server import planned_levels, serve_and_sweep

    console = Console()
    config = SmConfig(rounds=rounds, tolerance=tolerance, budget_s=seconds(budget), seed=seed)
    if backend not in ("green", "cores"):
        raise _fail(f"--backend {backend}: give green or cores")
    try:
        if dry_run:
            levels = planned_levels(backend)
            for shared, downstream in levels:
                console.print(f"{shared} SMs shared, {downstream} downstream", highlight=False)
            guess_s = min(config.budget_s, len(levels) * rounds * LEVEL_GUESS_S)
            console.print(f"about {guess_s / 60:.0f} minutes, at most {config.budget_s / 60:.0f}")
            return
        path, profile, why = serve_and_sweep(model, deploy, backend, config, out, console)
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(130) from interrupt
    except (ServerError, LiveError, ProfileError, OSError, ValueError, RuntimeError) as error:
        raise _fail(error) from error
    _show_levels(console, profile)
    console.print(f"{path}", highlight=False)
    if why:
        console.print(f"partial: {why}", style="bold yellow", highlight=False, markup=False)
        raise typer.Exit(1)


@app.command()
def lora(
    model: Annotated[str, typer.Argument(help="Model to serve, as for vllm serve.")],
    max_loras: Annotated[int, typer.Option(help="As for vllm serve.", min=1)] = 4,
    max_lora_rank: Annotated[int, typer.Option(help="As for vllm serve.", min=1)] = 16,
    tokens: Annotated[
        str | None, typer.Option(help="Padded numbers of tokens, such as 8,64,256.")
    ] = None,
    overlap: Annotated[
        str, typer.Option(help="shrink (all bits stay as they are) or full.")
    ] = "shrink",
    budget: Budget = "30m",
    out: Out = Path("profiles"),
    dry_run: DryRun = False,
    total_sms: Annotated[
        int | None, typer.Option(help="With --dry-run: SMs of a GPU that is not here.", min=1)
    ] = None,
    granule: Annotated[
        int, typer.Option(help="With --total-sms: the multiple in which SMs are granted.", min=1)
    ] = 8,
) -> None:
    """Search which SMs base and LoRA layers get side by side, for each layer and batch size.

    Goes on from the table that is there. Exit code 0: complete, 1: partial, 2: nothing measured.

    Example: horizon-profile lora MODEL --max-loras 4 --max-lora-rank 16
    """
    console = Console()
    if overlap not in ("shrink", "full"):
        raise _fail(f"--overlap {overlap}: give shrink or full")
    config = sweep.LoraConfig(
        adapters=Adapters(max_loras=max_loras, max_rank=max_lora_rank),
        tokens=_token_counts(tokens) if tokens else sweep.TOKENS,
        overlap="shrink" if overlap == "shrink" else "full",
        budget_s=seconds(budget),
    )
    try:
        if dry_run:
            _show_lora_plan(console, sweep.planned(model, config, total_sms, granule), config)
            return
        path, table, why = sweep.measure(
            model, config, out, lambda words: console.print(words, highlight=False)
        )
    except KeyboardInterrupt as interrupt:
        console.print(f"interrupted; the same command goes on from what is in {out}")
        raise typer.Exit(130) from interrupt
    except (OSError, ValueError, RuntimeError) as error:
        raise _fail(error) from error
    _show_partitions(console, table)
    console.print(f"{path}", highlight=False)
    if why:
        console.print(f"partial: {why}", style="bold yellow", highlight=False, markup=False)
        raise typer.Exit(1 if table.rows else 2)


def _token_counts(text: str) -> tuple[int, ...]:
    """``8,64`` as numbers.

    Raises:
        typer.BadParameter: one of them is no number above 0.
    """
    try:
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: give whole numbers, such as 8,64,256") from error
    if found[0] < 1:
        raise typer.BadParameter(f"{text!r}: give numbers above 0")
    return found


def _show_lora_plan(console: Console, plan: sweep.Plan, config: sweep.LoraConfig) -> None:
    table = Table("layer", "inputs", "outputs", "tokens")
    for kind, layer in plan.layers.items():
        outputs = " + ".join(map(str, layer.slices))
        table.add_row(kind, str(layer.inputs), outputs, ", ".join(map(str, plan.tokens)))
    console.print(table)
    console.print(
        f"{len(plan.counts)} counts of {plan.total_sms} SMs: {', '.join(map(str, plan.counts))}",
        highlight=False,
    )
    minutes = min(plan.guess_s, config.budget_s) / 60
    console.print(f"about {minutes:.0f} minutes, at most {config.budget_s / 60:.0f}")


def _show_partitions(console: Console, found: LoraTable) -> None:
    table = Table(
        "layer", "tokens", "base + LoRA SMs", "ms", "one after the other", title=found.kind
    )
    for row in found.rows:
        pair = row.pair
        table.add_row(
            row.layer,
            str(row.tokens),
            f"{pair[0]} + {pair[1]}" if pair else "-",
            _figure(row.overlapped_ms),
            _figure(row.sequential_ms),
        )
    console.print(table)


def _show_levels(console: Console, profile: Profile) -> None:
    assert profile.sms is not None
    table = Table("SMs", "TPOT ms", "co-run TTFT ms, p50 / p95", "n", title=profile.kind)
    for level in profile.sms.levels:
        table.add_row(
            str(level.shared_sms),
            _figure(level.tpot_p50_ms),
            f"{_figure(level.corun_ttft_p50_ms)} / {_figure(level.corun_ttft_p95_ms)}",
            str(level.samples),
        )
    console.print(table)
    sms = profile.sms
    console.print(f"S_min {sms.s_min_sms}, S_cap {sms.s_cap_sms}, B_sat {_figure(sms.b_sat)}")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def show(console: Console, profile: Profile) -> None:
    """Print a profile."""
    table = Table(title=f"{profile.model.name}: {profile.kind}", title_justify="left")
    for column in ("class", "n", "p50 ms", "p95 ms (95%)", "SLO ms", "TPOT ms"):
        table.add_column(column, justify="left" if column == "class" else "right", no_wrap=True)
    for name, one in profile.classes.items():
        table.add_row(
            name.value,
            str(one.samples),
            f"{one.solo_p50_ms:.4g}",
            f"{one.solo_p95_ms:.4g} ({one.solo_p95_low_ms:.4g}-{one.solo_p95_high_ms:.4g})",
            f"{one.slo_ms:.4g}",
            "" if one.tpot_p50_ms is None else f"{one.tpot_p50_ms:.3g}",
        )
    console.print(table)
    for name, why in profile.failed.items():
        console.print(f"{name.value} failed: {why}", highlight=False, markup=False)


def _show_plan(
    console: Console, wanted: tuple[RequestClass, ...], grid: Grid, budget_s: float
) -> None:
    table = Table("class", "sizes", "seconds a round, about")
    for name in wanted:
        cells = grid.cells(name)
        sizes = ", ".join(
            f"{c.prompt_words} words"
            + (f" + {c.audio_ms / 1e3:g} s of audio" if c.audio_ms else "")
            + (f" + {c.video_frames} frames" if c.video_frames else "")
            + (f" + {c.image_px} px" if c.image_px and not c.video_frames else "")
            + f" -> {c.answer_tokens} tokens"
            for c in cells
        )
        guess_s = len(cells) * _REQUEST_GUESS_S[name.output.value]
        table.add_row(name.value, sizes, f"{guess_s:.0f}")
    console.print(table)
    console.print(f"classes that the pipeline does not take are left out; at most {budget_s:.0f} s")


def _fail(error: Exception | str) -> typer.Exit:
    Console(stderr=True).print(
        f"horizon-profile: {error}", style="red", highlight=False, markup=False
    )
    return typer.Exit(2)
