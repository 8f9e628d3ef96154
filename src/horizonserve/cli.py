"""The ``horizonserve`` command."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from horizonserve import __version__, instance
from horizonserve.config import START_ONLY, ConfigError, Settings
from horizonserve.slo import RequestClass
from horizonserve.spatial.report import gpu_conditions, report

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
    from horizonserve.spatial.driver import Device, DriverError

    try:
        if (total_sms is None) != (compute_capability is None):
            raise ValueError("give --total-sms and --compute-capability together")
        if total_sms is None or compute_capability is None:
            device = Device()
            die, levels = device.die, device.levels()
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


@app.command()
def doctor(pid: InstanceOption = None, as_json: JsonOption = False) -> None:
    """Say what a running server does and what limits its promises.

    Watches the instance for three seconds. Exit code 0: fine, 1: advice, 2: no instance.

    Example: horizonserve doctor
    """
    try:
        before = instance.find(pid)
        time.sleep(3)
        found = instance.find(before.pid)
    except instance.InstanceError as error:
        raise _fail(error) from error
    content = _as_dict(found)
    spatial = content["spatial"]
    if found.settings.caps and found.settings.spatial_backend in ("auto", "green"):
        spatial["conditions"] = gpu_conditions(found.pid)
    advice = diagnose(found, before.counters)
    if spatial["state"] == "refused":
        advice.append(f"spatial control is refused: {spatial['why']}")
    content["advice"] = advice
    if as_json:
        typer.echo(json.dumps(content))
    else:
        table = Table("class", "SLO ms", "set by", title=f"instance {found.pid}")
        for request_class in RequestClass:
            field = found.settings.slo_field(request_class)
            table.add_row(
                request_class, f"{found.settings.slo_ms(request_class):g}", field or "default"
            )
        console = Console()
        console.print(table)
        console.print(f"spatial control: {spatial['state']}", highlight=False)
        for condition, wrong in spatial.get("conditions", {}).items():
            console.print(f"  {condition}: {wrong or 'yes'}", highlight=False, markup=False)
        for line in advice or ["nothing to advise"]:
            console.print(f"- {line}", highlight=False)
    sys.exit(1 if advice else 0)


def diagnose(found: instance.Instance, before: instance.Counters) -> list[str]:
    """Advice from an instance's settings and from its counters now and a moment before."""
    advice = []
    settings, counters = found.settings, found.counters
    most = found.identity["max_slots"]
    slots = min(settings.slots or most, most)
    steps = counters.steps - before.steps
    full = counters.full_steps - before.full_steps
    if steps and full > steps / 2:
        remedy = (
            f"`horizonserve policy set slots={min(2 * slots, most)}`"
            if slots < most
            else f"a max_num_seqs above {most} in the deploy file"
        )
        advice.append(
            f"all {slots} slots were taken while requests waited in {full} of {steps} steps:"
            f" more slots may help more than any policy; try {remedy} and watch the time per token"
        )
    elif slots < 4:
        advice.append(
            f"{slots} slots: order decides little; set max_num_seqs to 4 or more"
            if most < 4
            else f"{slots} of {most} slots usable: order decides little; use 4 or more"
        )
    defaults = [c.value for c in RequestClass if settings.slo_field(c) is None]
    if settings.scheduler != "default" and len(defaults) == len(RequestClass):
        advice.append("no SLO is set; every class has a built-in default that fits no machine")
    return advice
