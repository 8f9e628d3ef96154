"""Kill -9 of each process of a real server in turn, under load: what is left, what is believed.

    python scripts/kill_rounds.py --out FILE [--rounds 20] [--model DIR]

Each round starts a server with spatial control on CPU cores, loads it with text and speech, kills
one process (the launching one, then stage 0, 1, 2, and so on), asks an observer that was attached
before what it believes of it now, and ends the rest. The next round's start has to find and remove
what the dead server left. One JSON line per round; exit code 1 if any round failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from horizonserve import instance
from horizonserve.bench.guard import descendants
from horizonserve.bench.server import HOST, MODEL_NAME, command_line, environment, free_port
from horizonserve.process import start_ticks
from horizonserve.spatial.monitor import DIRECTORY, LIVENESS_S, PREFIX, Monitor, MonitorError
from horizonserve.spatial.stage import LINGER_S, SILENCE_S

BOOT_LIMIT_S = 600.0
VICTIMS = ("launcher", 0, 1, 2)


def our_files() -> set[str]:
    """Everything of ours in /dev/shm, half-made files included."""
    found = (*DIRECTORY.glob("horizonserve-*"), *DIRECTORY.glob(".horizonserve-*"))
    return {path.name for path in found}


def of_the_dead() -> list[str]:
    """Those whose name ends with the id of no living process."""
    return sorted(name for name in our_files() if start_ticks(int(name.rpartition("-")[2])) is None)


def wait_for(what: str, holds: Any, limit_s: float) -> None:
    until_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > until_s:
            raise TimeoutError(f"{what}: not within {limit_s:.0f} s")
        time.sleep(0.05)


def answers(url: str) -> bool:
    with (
        contextlib.suppress(OSError, urllib.error.URLError),
        urllib.request.urlopen(f"{url}/health", timeout=2) as response,
    ):
        return bool(response.status == 200)
    return False


@contextlib.contextmanager
def server(model: Path, deploy: Path, log_file: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server that nobody cleans up after; its processes are ended by id."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="horizonserve-") as scratch:
        env = environment(Path(scratch), {"HORIZON_SPATIAL_BACKEND": "cores"})
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                command_line(model, deploy, scheduler="horizon", port=port),
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        family: set[int] = set()
        try:
            url = f"http://{HOST}:{port}"

            def up() -> bool:
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended with {process.returncode}: {log_file}")
                family.update(descendants(process.pid))
                return answers(url)

            wait_for("the server answers", up, BOOT_LIMIT_S)
            family.update(descendants(process.pid))
            yield process, url
        finally:
            family.update(descendants(process.pid))
            for number in (signal.SIGTERM, signal.SIGKILL):
                for pid in (process.pid, *family):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                until_s = time.monotonic() + 20
                while time.monotonic() < until_s:
                    process.poll()
                    if not any(Path(f"/proc/{pid}").exists() for pid in (process.pid, *family)):
                        break
                    time.sleep(0.1)


def load(url: str, stop: threading.Event) -> list[threading.Thread]:
    """Text and speech, in closed loops, until told to stop."""

    def loop(output: str) -> None:
        body = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": "the quick brown fox"}],
            "modalities": [output],
            "max_tokens": 30,
        }
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        while not stop.is_set():
            try:
                urllib.request.urlopen(request, timeout=60).read()
            except (OSError, urllib.error.URLError):
                stop.wait(0.5)

    threads = [
        threading.Thread(target=loop, args=(output,), daemon=True)
        for output in ("text", "text", "audio", "audio", "audio")
    ]
    for thread in threads:
        thread.start()
    return threads


def believed(monitor: Monitor, name: str, stage: int | None) -> list[str]:
    """What the observer still believes of a process that is dead; nothing is right."""
    now_s = time.monotonic()
    wrong = []
    if stage is None:
        with contextlib.suppress(MonitorError):
            Monitor.attach(name).close()
            wrong.append("the record of a dead server can still be attached to")
        return wrong
    if monitor.active(stage, now_s, SILENCE_S, LINGER_S) is not False:
        wrong.append(f"stage {stage} is dead and counts as active")
    reading = monitor.read(0)
    if stage == 0 and reading and monitor.decision(reading.levels, now_s) is not None:
        wrong.append("the dead shared stage's level is still believed")
    return wrong


def play_round(number: int, model: Path, deploy: Path, log_file: Path) -> dict[str, Any]:
    """One start, one kill, one look."""
    victim = VICTIMS[number % len(VICTIMS)]
    before = of_the_dead()
    wrong: list[str] = []
    stop = threading.Event()
    with server(model, deploy, log_file) as (process, url):
        (own,) = [one for one in instance.live() if one.pid in descendants(process.pid)]
        # Servers of others may live beside ours, and die while it starts.
        wrong += [
            f"after the start there is still {name}" for name in before if name in our_files()
        ]
        if not {own.path.name, f"{PREFIX}{process.pid}"} <= our_files():
            wrong.append("a file of the live server is missing")
        name = own.identity["spatial"]["record"]
        monitor = Monitor.attach(name)
        threads = load(url, stop)
        try:
            levels: set[int] = set()

            def busy() -> bool:
                shared = monitor.read(0)
                if shared is not None and shared.state.applied is not None:
                    levels.add(shared.state.applied)
                active = [monitor.active(s, time.monotonic(), SILENCE_S, LINGER_S) for s in (1, 2)]
                return len(levels) > 1 and any(active)

            wait_for("the level changes under load", busy, 120)
            reading = None if victim == "launcher" else monitor.read(int(victim))
            pid = process.pid if victim == "launcher" else reading.pid if reading else 0
            os.kill(pid, signal.SIGKILL)

            def dead() -> bool:
                process.poll()
                return start_ticks(pid) is None

            wait_for("the process is gone", dead, 30)
            time.sleep(LIVENESS_S + 0.2)
            wrong += believed(monitor, name, None if victim == "launcher" else int(victim))
        finally:
            stop.set()
            monitor.close()
    for thread in threads:
        thread.join(65)
    return {
        "round": number,
        "victim": victim,
        "left_by_the_last": before,
        "left_at_end": of_the_dead(),
        "wrong": wrong,
    }


def main() -> None:
    """Config, rounds, verdict."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", type=Path, default=Path("results/models/qwen2.5-omni-tiny"))
    parser.add_argument(
        "--deploy", type=Path, default=Path("configs/deploy/qwen2_5_omni_tiny.yaml")
    )
    a = parser.parse_args()
    if not (a.model / "config.json").exists():
        from horizonserve.models import make_model

        make_model("qwen2.5-omni", "tiny", a.model)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    done = a.out.read_text().splitlines() if a.out.exists() else []
    failed = sum(bool(json.loads(line)["wrong"]) for line in done)
    for number in range(len(done), a.rounds):
        result = play_round(number, a.model, a.deploy, a.out.with_suffix(".log"))
        failed += bool(result["wrong"])
        with a.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)
    print(f"{a.rounds} rounds, {failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
