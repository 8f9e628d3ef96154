"""The record of a running instance, with real processes and real damage."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from horizonserve import instance
from horizonserve.config import Settings
from horizonserve.instance import Counters, InstanceError, Record
from horizonserve.slo import RequestClass

SETTINGS = Settings().changed({"scheduler": "horizon", "slo_text_ms": 500})


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of our own in /dev/shm's place: other servers may run on this machine."""
    monkeypatch.setattr(instance, "DIRECTORY", tmp_path)
    return tmp_path


@pytest.fixture
def record() -> Iterator[Record]:
    made = Record(SETTINGS, {"model": "m", "max_slots": 4})
    yield made
    made.close()


def test_a_record_is_private_and_shows_what_it_was_made_with(record: Record) -> None:
    assert stat.S_IMODE(record.path.stat().st_mode) == 0o600
    found = instance.find()
    assert found.pid == os.getpid()
    assert found.identity == {"model": "m", "max_slots": 4}
    assert found.settings == SETTINGS
    assert found.applied
    record.publish(Counters(steps=7, waiting=3))
    assert instance.find().counters == Counters(steps=7, waiting=3)


def test_a_request_is_seen_once_and_confirmed(record: Record) -> None:
    assert record.poll() is None
    wanted = SETTINGS.changed({"scheduler": "edf", "slots": 2})
    assert not instance.request(instance.find(), wanted, wait_s=0)
    assert not instance.find().applied
    assert record.poll() == wanted
    assert record.poll() is None
    found = instance.find()
    assert found.applied
    assert found.settings == wanted


def test_the_last_of_several_requests_counts(record: Record) -> None:
    for slots in (1, 2, 3):
        instance.request(instance.find(), SETTINGS.changed({"slots": slots}), wait_s=0)
    assert (seen := record.poll()) is not None
    assert seen.slots == 3


def test_changes_build_on_each_other(record: Record) -> None:
    found = instance.find()
    for change in ({"slots": 8}, {"scheduler": "edf"}):
        instance.request(found, lambda last, change=change: last.changed(change), wait_s=0)
    assert record.poll() == SETTINGS.changed({"slots": 8, "scheduler": "edf"})


def test_closing_removes_the_file(record: Record) -> None:
    record.close()
    record.close()
    assert instance.live() == []
    with pytest.raises(InstanceError, match="no live instance"):
        instance.find()


def test_asking_an_instance_that_has_gone(record: Record) -> None:
    found = instance.find()
    record.close()
    with pytest.raises(InstanceError, match="gone"):
        instance.request(found, SETTINGS)


def test_all_settings_at_once_fit(record: Record) -> None:
    every = {name: 123456.789 for name in Settings.model_fields if name.endswith("_ms")}
    every["estimate_ms"] = dict.fromkeys(RequestClass, 123456.789)
    wanted = Settings().changed(
        {
            **every,
            **{
                "scheduler": "qoserve-static",
                "slots": 10**9,
                "token_budget": 10**9,
                "u_guard": 1.23456,
            },
            **{"rotation": False, "slack_guard": False, "long_cap": False, "lost": "protect"},
            **{
                "long_cap_requests": 10**9,
                "max_hide_s": 59.999,
                "slo_multiple": 5.1234,
                "u_lost": 0.51234,
            },
            **{"spatial": False, "spatial_backend": "dry-run", "graphs_per_level": True},
            **{"s_min_sms": 10**9, "s_cap_sms": 10**9, "rung_step": 10**9},
            **{"b_sat": 0.51234, "min_dwell_s": 59.999, "pressure": "utilization"},
            **{"lending": False, "batch": 10**9, "tbt_multiple": 1.51234},
            **{"fixed_sms": 10**9, "profile_mismatch": "refuse", "estimates": "constant"},
            "solo_p95_ms": dict.fromkeys(RequestClass, 123456.789),
            **{"dynamic_budget": True, "max_bank_s": 599.99999, "paced": False},
            **{"first_token": "strict", "on_finish": "flush", "lora_overlap": "shrink"},
            # What JSON spells longest.
            **{"step_log": "\x01" * 512, "profile": "\x01" * 256, "services": "\x01" * 256},
            "lora_table": "\x01" * 256,
        }
    )
    assert wanted.model_fields_set == set(Settings.model_fields)
    instance.request(instance.find(), wanted, wait_s=0)
    assert record.poll() == wanted


CHILD = """
    import sys, time
    from pathlib import Path
    from horizonserve import instance
    from horizonserve.config import Settings
    instance.DIRECTORY = Path(sys.argv[1])
    record = instance.Record(Settings(), {"max_slots": 1})
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def child(directory: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(directory)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_two_instances_must_be_named(record: Record, child: subprocess.Popen[str]) -> None:
    assert {i.pid for i in instance.live()} == {os.getpid(), child.pid}
    with pytest.raises(InstanceError, match="--instance"):
        instance.find()
    assert instance.find(child.pid).identity == {"max_slots": 1}


def test_a_killed_instance_is_not_believed_and_its_record_goes_at_the_next_start(
    directory: Path, child: subprocess.Popen[str]
) -> None:
    leftover = directory / f"{instance.PREFIX}{child.pid}"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert leftover.exists()
    assert instance.live() == []
    record = Record(SETTINGS, {})
    assert not leftover.exists()
    assert [i.pid for i in instance.live()] == [os.getpid()]
    record.close()


def test_a_zombie_is_not_a_live_instance(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGKILL)
    time.sleep(0.2)  # dead, but not waited for
    assert instance.live() == []


def test_another_process_with_the_pid_of_a_dead_one_is_not_believed(record: Record) -> None:
    content = bytearray(record.path.read_bytes())
    content[16] ^= 1  # the start time
    record.path.write_bytes(content)
    assert instance.live() == []


def test_damage_is_never_believed_and_never_raises(record: Record) -> None:
    """Random bytes, truncation and garbage: the record reads as valid settings or as nothing."""
    rng = random.Random(1)
    intact = record.path.read_bytes()
    believed = 0
    for _ in range(3000):
        content = bytearray(intact)
        for _ in range(rng.randint(1, 20)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        if rng.random() < 0.1:
            del content[rng.randrange(len(content)) :]
        record.path.write_bytes(content)
        for found in instance.live():
            believed += 1
            assert found.settings == SETTINGS
    assert believed  # most bytes are padding
    record.path.write_bytes(b"")
    assert instance.live() == []


def test_the_scheduler_survives_damage_to_the_request(record: Record) -> None:
    rng = random.Random(2)
    with open(record.path, "r+b") as file:
        for _ in range(3000):
            file.seek(rng.randrange(24, instance.SIZE))
            file.write(bytes([rng.randrange(256)]))
            file.flush()
            seen = record.poll()
            assert seen is None or isinstance(seen, Settings)


def test_a_writer_that_died_half_way_blocks_nobody(record: Record) -> None:
    with open(record.path, "r+b") as file:
        file.seek(24)
        file.write((3).to_bytes(8, "little"))  # odd: being written
    assert record.poll() is None
    wanted = SETTINGS.changed({"slots": 2})
    instance.request(instance.find(), wanted, wait_s=0)
    assert record.poll() == wanted
