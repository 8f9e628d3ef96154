"""The ``horizonserve`` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from horizonserve import __version__, instance
from horizonserve.config import START_ONLY, ConfigError, Settings
from horizonserve.spatial.report import report

if TYPE_CHECKING:
    from horizonserve.doctor import Findings

app = typer.Typer(
    name="horizonserve",
    help="Latency promises for every kind of request of an omni model on one GPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
policy = typer.Typer(help="See and change the policy of a running server.", no_args_is_help=True)
app.add_typer(policy, name="policy")

InstanceOption = Annotated[
    int | None,
    typer.Option("--instance", help="Process id of the instance, where several run."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _fail(error: Exception) -> typer.Exit:
    Console(stderr=True).print(f"horizonserve: {error}", style="red", highlight=False, markup=False)
    return typer.Exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Latency promises for every kind of request of an omni model on one GPU."""


@app.command("make-model")
def make_model(
    family: Annotated[str, typer.Argument(help="Model family: qwen2.5-omni, mimo-audio or bagel.")],
    directory: Annotated[Path, typer.Argument(help="Where to write it.")],
    size: Annotated[str, typer.Option(help="tiny (for tests) or small (for measuring).")] = "tiny",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Build a random-weight model that the real server runs on a CPU.

    Example: horizonserve make-model qwen2.5-omni --size small models/small
    """
    from horizonserve import models

    try:
        typer.echo(models.make_model(family, size, directory, seed))
    except (ValueError, OSError) as error:
        raise _fail(error) from error


@app.command()
def demo(
    work: Annotated[Path, typer.Option(help="Where the model and the results go.")] = Path(
        "results"
    ),
    deploy: Annotated[Path, typer.Option(help="Deploy file of the model.")] = Path(
        "configs/deploy/qwen2_5_omni_small.yaml"
    ),
    minutes: Annotated[float, typer.Option(help="Most time that it takes.", min=5)] = 10,
) -> None:
    """Play one mixed trace against each policy on the real server, and show what was kept.

    Example: horizonserve demo --work results
    """
    from horizonserve.bench.demo import run
    from horizonserve.bench.live import LiveError
    from horizonserve.bench.server import ServerError

    if not deploy.is_file():
        raise _fail(ConfigError(f"--deploy {deploy}: no such file; run it in a checkout"))
    try:
        run(work, deploy, work / "demo", time_limit_s=60 * minutes)
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(130) from interrupt
    except (LiveError, ServerError) as error:
        raise _fail(error) from error


def _as_dict(found: instance.Instance) -> dict[str, Any]:
    return {
        "pid": found.pid,
        **found.identity,
        "spatial": report(found.identity["spatial"], found.settings),
        "applied": found.applied,
        "settings": found.settings.model_dump(mode="json", exclude_none=True),
        "counters": found.counters._asdict(),
    }


@policy.command("show")
def show(pid: InstanceOption = None, as_json: JsonOption = False) -> None:
    """Print the policy, limits and counters of a running server.

    Example: horizonserve policy show --json
    """
    try:
        content = _as_dict(instance.find(pid))
    except instance.InstanceError as error:
        raise _fail(error) from error
    if as_json:
        typer.echo(json.dumps(content))
        return
    table = Table(show_header=False, box=None)
    for key, value in content.items():
        if isinstance(value, dict):
            for name, item in value.items():
                table.add_row(f"{key}.{name}", str(item))
        else:
            table.add_row(key, str(value))
    Console().print(table)


@policy.command("set")
def set_(
    changes: Annotated[
        list[str],
        typer.Argument(help="FIELD=VALUE; FIELD= without a value goes back to the default."),
    ],
    pid: InstanceOption = None,
) -> None:
    """Change settings of a running server from its next step on; no request is lost.

    Example: horizonserve policy set scheduler=edf slots=8 slo_t2a_ms=9000
    """
    try:
        found = instance.find(pid)
        confirmed = instance.request(
            found, lambda settings: _within(found, apply_changes(settings, changes))
        )
    except (ConfigError, instance.InstanceError) as error:
        raise _fail(error) from error
    typer.echo("applied" if confirmed else "accepted; applies at the server's next step")


def _within(found: instance.Instance, settings: Settings) -> Settings:
    """The settings, if the server was started with room for them."""
    most = found.identity["max_slots"]
    if settings.slots is not None and settings.slots > most:
        raise ConfigError(
            f"slots={settings.slots}: the server was started with {most}; give less, or restart it"
            " with a larger max_num_seqs"
        )
    for field in START_ONLY:
        if getattr(settings, field) != getattr(found.settings, field):
            raise ConfigError(
                f"{field}={getattr(settings, field)!r}: is read at start only; restart the server"
                f" with HORIZON_{field.upper()}"
            )
    if (
        settings.spatial
        and not found.settings.spatial
        and "record" not in found.identity["spatial"]
    ):
        raise ConfigError(
            "spatial=on: the server made no levels at its start; restart it with"
            " --scheduler horizon and HORIZON_SPATIAL=on"
        )
    levels = [shared for shared, _ in found.identity["spatial"].get("levels", [])]
    if settings.fixed_sms is not None and settings.fixed_sms not in levels:
        raise ConfigError(
            f"fixed_sms={settings.fixed_sms}: the server has the levels {levels}; give one of these"
        )
    low, high = found.identity["min_token_budget"], found.identity["max_token_budget"]
    if settings.token_budget is not None and not low <= settings.token_budget <= high:
        raise ConfigError(
            f"token_budget={settings.token_budget}: the server takes {low} to {high}; give one of"
            " these, or restart it with a larger max_num_batched_tokens"
        )
    return settings


def apply_changes(settings: Settings, changes: list[str]) -> Settings:
    """Settings with ``FIELD=VALUE`` changes applied.

    Raises:
        ConfigError: a change is malformed, or names an unknown field or a bad value.
    """
    values: dict[str, Any] = {}
    cleared: list[str] = []
    for change in changes:
        field, equals, text = change.partition("=")
        if not equals:
            raise ConfigError(f"{change!r}: write FIELD=VALUE, such as slots=8")
        if text:
            # YAML, so that `off`, numbers and {t2t: 80} mean what they mean in a settings file.
            try:
                values[field] = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ConfigError(f"{change!r}: not a YAML value ({error})") from error
        else:
            cleared.append(field)
    kept = settings.model_dump(exclude_unset=True, exclude=set(cleared))
    unknown = [field for field in cleared if field not in Settings.model_fields]
    return Settings().changed({**kept, **values, **dict.fromkeys(unknown)})


@app.command("ladder")
def show_ladder(
    total_sms: Annotated[int | None, typer.Option(help="Of a GPU that is not here.")] = None,
    compute_capability: Annotated[
        str | None, typer.Option(help="X.Y, with --total-sms.", metavar="X.Y")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the SM levels of a GPU; makes no context on it.

    Without options it asks this machine's driver. A real die may have fewer levels than the table.

    Example: horizonserve ladder --total-sms 132 --compute-capability 9.0
    """
    from horizonserve.spatial import ladder
    from horizonserve.spatial.driver import DriverError, levels_here

    try:
        if (total_sms is None) != (compute_capability is None):
            raise ValueError("give --total-sms and --compute-capability together")
        if total_sms is None or compute_capability is None:
            die, levels = levels_here("green")
        else:
            major, _, minor = compute_capability.partition(".")
            if not (major.isdecimal() and minor.isdecimal()):
                raise ValueError(f"--compute-capability {compute_capability}: write X.Y")
            die = ladder.Die(total_sms, *ladder.smallest((int(major), int(minor))))
            levels = ladder.existing(die, ladder.aligned(die))
        chosen = ladder.choose(die, levels)
    except (ValueError, DriverError) as error:
        raise _fail(error) from error
    if as_json:
        rows = [[level.shared_sms, level.downstream_sms] for level in chosen]
        typer.echo(
            json.dumps({"total_sms": die.total_sms, "existing": len(levels), "levels": rows})
        )
        return
    table = Table("shared SMs", "downstream SMs", title=f"{die.total_sms} SMs")
    for level in chosen:
        both = ("all", "all") if level.whole else (level.shared_sms, level.downstream_sms)
        table.add_row(*map(str, both))
    Console().print(table)


@app.command("doctor")
def show_doctor(
    pid: InstanceOption = None,
    config: Annotated[
        str | None, typer.Option(help="Settings file, instead of HORIZON_CONFIG's.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Profile, instead of the one that the settings name.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a server does, or would do if it were started here, and what limits its promises.

    Watches a running server for three seconds. Exit code 0: fine, 1: advice, 2: it cannot work.

    Example: horizonserve doctor --profile profiles/PLATFORM/MODEL.yaml
    """
    from horizonserve.doctor import examine

    try:
        found = examine(pid, config, profile)
    except instance.InstanceError as error:
        raise _fail(error) from error
    if as_json:
        typer.echo(json.dumps(found.to_json()))
    else:
        _print_findings(found)
    raise typer.Exit(found.exit_code)


def _print_findings(found: Findings) -> None:
    console, content = Console(), found.content
    for title in ("versions", "platform", "plugin", "profile"):
        items = content.get(title) or {}
        words = ", ".join(f"{name} {value}" for name, value in items.items() if value is not None)
        console.print(f"{title}: {words or 'none'}", highlight=False, markup=False)
    running = content["instance"]
    console.print(
        "no server runs here" if running is None else f"instance {running['pid']}", highlight=False
    )
    table = Table("class", "SLO ms", "set by", "solo p95 ms")
    for row in content["slos"]:
        p95_ms = row["solo_p95_ms"]
        table.add_row(
            row["class"],
            f"{row['slo_ms']:g}",
            row["set_by"] + (f" ({row['source']})" if row["source"] else ""),
            "" if p95_ms is None else f"{p95_ms:g}" + ("" if row["feasible"] else " (!)"),
        )
    console.print(table)
    for name, one in (content["services"] or {}).items():
        promise = f"TTFT {one['ttft_ms']:g} ms, TBT {one['tbt_ms']:g} ms"
        console.print(f"service {name}: {promise}", highlight=False, markup=False)
    spatial = content["spatial"]
    console.print(f"spatial control: {spatial['state']}", highlight=False)
    if levels := spatial.get("levels"):
        console.print(f"  levels: {', '.join(f'{a} + {b}' for a, b in levels)}", highlight=False)
    for condition, wrong in spatial.get("conditions", {}).items():
        console.print(f"  {condition}: {wrong or 'yes'}", highlight=False, markup=False)
    for line in found.wrong:
        console.print(f"- {line}", style="red", highlight=False, markup=False)
    for line in found.advice or ([] if found.wrong else ["nothing to advise"]):
        console.print(f"- {line}", highlight=False, markup=False)
