"""The step log: what an entry says, and a file that never holds up a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from horizonserve.policy.batch import StepModel
from horizonserve.policy.lending import Job, Lending, Limits, Plan
from horizonserve.policy.slack import Ticket
from horizonserve.serving import step_log
from horizonserve.serving.step_log import StepLog, entry
from horizonserve.slo import RequestClass

NOW_S = 100.0


def ticket(name: str, deadline_s: float, tbt_s: float = inf, **more: Any) -> Ticket:
    request_class = RequestClass.T2A if name.startswith("long") else RequestClass.T2T
    return Ticket(name, request_class, request_class.path, 99.0, deadline_s, 0.5, tbt_s, **more)


def job(of: Ticket, tokens: int, generated: int = 0, in_flight: int = 0) -> Job:
    request = SimpleNamespace(request_id=f"chatcmpl-{of.group}")
    decode = generated > 0
    return Job(request, of, tokens, 20 * decode, generated, 30, in_flight, decode=decode)


def test_an_entry_says_who_did_what_and_how_much_time_its_promise_left() -> None:
    stream = job(ticket("stream", 99.5, 0.25, released_s=100.0), 1, generated=4, in_flight=1)
    late = job(ticket("late", 99.5, inf, released_s=99.9, broken=True), 1, generated=2)
    # Its first token is still in a step under way.
    long = job(ticket("long", 103.0), 1, generated=1, in_flight=1)
    new = job(ticket("new", 100.04), 17)
    plan = Plan([long], [stream, late], [new], tokens=18, limit_s=0.0825, given_up=2)
    said = entry(plan, NOW_S)
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    assert {name: value for name, value in said.items() if name != "requests"} == {
        "time_s": 100.0,
        "limit_ms": 82.5,
        "given_up": 2,
    }
    rows = [tuple(request.values()) for request in said["requests"]]
    assert list(said["requests"][0]) == [
        *("id", "path", "state", "tokens", "slack_ms", "broken", "first_token")
    ]
    assert rows == [
        ("chatcmpl-long", "long", "ran", 1, 3000.0, False, False),
        # R_4 = 100, one token under way: the next is due two TBTs later.
        ("chatcmpl-stream", "short", "lent", 1, 500.0, False, True),
        ("chatcmpl-late", "short", "lent", 1, None, True, True),
        ("chatcmpl-new", "short", "entered", 17, 40.0, False, False),
    ]


def test_an_entry_of_a_real_plan_names_all_who_run_or_enter_once() -> None:
    served = {"released_s": 103.0, "served_s": NOW_S}
    banked = [job(ticket(f"s{i}", 99.5, 0.3, **served), 1, generated=4) for i in range(5)]
    new = job(ticket("new", 100.5), 40)
    new.runs = False
    plan = Lending(StepModel(), Limits(tokens=64, requests=2)).plan(banked, [new], NOW_S)
    said = entry(plan, NOW_S)["requests"]
    assert {r["id"] for r in said} == {j.request.request_id for j in (*banked, new)}
    assert sorted(r["state"] for r in said) == ["entered", *["lent"] * 4, "ran"]
    assert [r["id"] for r in said if r["state"] == "entered"] == ["chatcmpl-new"]


def read(log: StepLog) -> list[Any]:
    return [json.loads(line) for line in log.path.read_text().splitlines()]


def test_what_was_added_is_there_after_a_period_and_after_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_log, "PERIOD_S", 0.05)
    log = StepLog(str(tmp_path / "steps.v1.jsonl"))
    assert log.path == tmp_path / f"steps.v1-{os.getpid()}.jsonl"
    log.add({"n": 0})
    until_s = time.monotonic() + 10
    while not (log.path.exists() and log.path.stat().st_size) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert read(log) == [{"n": 0}]
    for n in range(1, 1000):
        log.add({"n": n})
    log.close()
    log.close()
    assert read(log) == [{"n": n} for n in range(1000)]
    log.add({"n": "too late"})
    assert len(read(log)) == 1000


def test_a_process_that_ends_without_closing_leaves_its_last_second(tmp_path: Path) -> None:
    code = f"""
from horizonserve.serving.step_log import StepLog
log = StepLog({str(tmp_path / "steps")!r})
log.add({{"n": 1}})
print(log.path)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert Path(done.stdout.strip()).read_text() == '{"n": 1}\n'


def test_a_slow_disk_costs_entries_and_not_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm_log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_log, "MAX_WAITING", 3)
    pipe = tmp_path / f"steps-{os.getpid()}"
    os.mkfifo(pipe)  # to open it takes a reader
    log = StepLog(str(tmp_path / "steps"))
    for n in range(5):
        log.add({"n": n})
    assert log.dropped == 2
    with pipe.open() as reader:
        log.close()
        assert [json.loads(line)["n"] for line in reader] == [0, 1, 2]
    assert "lacks 2 steps" in vllm_log.text


@pytest.mark.parametrize("full", [True, False], ids=["the disk is full", "no such directory"])
def test_a_file_that_cannot_be_written_ends_the_log_with_one_warning(
    full: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    vllm_log: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(step_log, "PERIOD_S", 0.01)
    directory = tmp_path / "logs"
    if full:
        directory.mkdir()
        (directory / f"steps-{os.getpid()}").symlink_to("/dev/full")
    log = StepLog(str(directory / "steps"))
    until_s = time.monotonic() + 10
    while not vllm_log.records and time.monotonic() < until_s:
        log.add({"n": 1})
        time.sleep(0.01)
    for _ in range(10):
        log.add({"n": 2})
    log.close()
    (warning,) = vllm_log.messages
    assert warning.startswith(f"HorizonServe: the step log {log.path} cannot be written (")
    assert ("No space left" if full else "No such file") in warning
    assert log.dropped == 0
