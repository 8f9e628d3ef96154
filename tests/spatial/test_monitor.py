"""The record of the stages, with real processes and real damage."""

from __future__ import annotations

import os
import random
import signal
import stat
import struct
import subprocess
import sys
import textwrap
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from horizonserve.process import start_ticks
from horizonserve.spatial import monitor as module
from horizonserve.spatial.monitor import (
    VARIABLE,
    Decision,
    Level,
    Monitor,
    MonitorError,
    State,
    sweep,
)

LEVELS: Final = (Level(16, 116, 7), Level(32, 100, 8), Level(64, 68, 2**64 - 1))
STATE: Final = State(True, 12.5, 2, 1, 4, 0.75, 12.0)
SLOT_AT: Final = 256


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of our own in /dev/shm's place: other servers may run on this machine."""
    monkeypatch.setattr(module, "DIRECTORY", tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


@pytest.fixture
def record() -> Iterator[Monitor]:
    made = Monitor.create()
    yield made
    made.close()


def stage(code: str) -> subprocess.Popen[str]:
    """A process that attaches to the record it finds in its environment, as a stage does."""
    head = f"""
        import mmap, os, sys, time
        from pathlib import Path
        from horizonserve.spatial import monitor as module
        from horizonserve.spatial.monitor import *
        module.DIRECTORY = Path({str(module.DIRECTORY)!r})
        LEVELS = tuple(map(Level._make, {[tuple(level) for level in LEVELS]!r}))
        """
    source = textwrap.dedent(head) + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_what_a_stage_writes_the_others_read(record: Monitor) -> None:
    slot = record.claim(0, LEVELS)
    other = Monitor.attach()
    assert slot.publish(STATE, 13.0)
    reading = other.read(0)
    assert reading == (os.getpid(), start_ticks(os.getpid()), 13.0, LEVELS, STATE)
    assert other.decision(LEVELS, 13.0) == Decision(2, 4)
    assert other.active(0, 13.0, 1.0) is True
    assert other.read(1) is None
    assert other.active(1, 13.0, 1.0) is False
    slot.publish(State(), 14.0)
    assert (reading := other.read(0)) is not None
    assert reading.state == State()
    assert other.decision(LEVELS, 14.0) is None
    other.close()


def test_a_stage_counts_as_active_for_a_moment_after_its_forward(record: Monitor) -> None:
    slot = record.claim(1, LEVELS)
    slot.publish(State(active=False, last_forward_s=5.0), 5.0)
    seen = [record.active(1, 5.0 + late_s, 60.0, 0.1) for late_s in (0.05, 0.15)]
    assert seen == [True, False]


def test_the_first_veto_holds_for_all(record: Monitor) -> None:
    other = Monitor.attach()
    assert other.vetoed() is None
    record.veto("stage 1: ü" + "x" * 500)
    record.veto("stage 2: other")
    assert (reason := other.vetoed()) is not None
    assert reason.startswith("stage 1: üxxx") and 150 < len(reason) < 250
    other.close()
    assert other.vetoed() is None
    other.veto("closed")


def test_a_damaged_veto_is_none(record: Monitor) -> None:
    record.veto("stage 1: graphs")
    os.pwrite(record.file, b"?", 60)
    assert record.vetoed() is None


def test_the_record_is_private_and_goes_with_its_server(record: Monitor, directory: Path) -> None:
    assert stat.S_IMODE(record.path.stat().st_mode) == 0o600
    assert os.environ[VARIABLE] == record.path.name
    record.close()
    record.close()
    assert list(directory.iterdir()) == []
    assert VARIABLE not in os.environ


def test_a_closed_record_is_neither_written_nor_believed(record: Monitor) -> None:
    slot = record.claim(0, LEVELS)
    other = Monitor.attach()
    other_slot = other.claim(1, LEVELS)
    other.close()
    record.close()
    assert not slot.publish(STATE, 1.0)
    assert not other_slot.publish(STATE, 1.0)
    other_slot.close()
    assert record.read(0) is None
    assert record.active(0, 1.0, 1.0) is None
    assert record.decision(LEVELS, 1.0) is None


@pytest.mark.parametrize(
    "state", [{"requested": 3}, {"applied": 3}, {"applied": -2}, {"epoch": -1}]
)
def test_a_writer_names_levels_of_its_ladder_only(record: Monitor, state: dict[str, int]) -> None:
    slot = record.claim(0, LEVELS)
    with pytest.raises(ValueError, match="levels 0 to 2"):
        slot.publish(State(**state), 1.0)  # type: ignore[arg-type]
    assert (reading := record.read(0)) is not None
    assert reading.state == State()


@pytest.mark.parametrize(("index", "levels"), [(-1, LEVELS), (8, LEVELS), (0, LEVELS * 3)])
def test_there_are_eight_slots_of_eight_levels(
    record: Monitor, index: int, levels: tuple[Level, ...]
) -> None:
    with pytest.raises(MonitorError, match="at most 8"):
        record.claim(index, levels)


def test_an_index_means_nothing_under_another_ladder(record: Monitor) -> None:
    record.claim(0, LEVELS).publish(STATE, 1.0)
    other = (*LEVELS[:2], Level(64, 68, 1))
    record.claim(1, other).publish(STATE, 1.0)
    assert record.decision(LEVELS, 1.0) is not None
    assert record.decision(other, 1.0) is None
    assert record.disagreeing(LEVELS) == [1]
    assert record.disagreeing(other) == [0]


def test_a_silent_stage_counts_as_inactive_and_its_decision_stands(record: Monitor) -> None:
    record.claim(0, LEVELS).publish(STATE, 100.0)
    assert record.active(0, 104.9, 5.0) is True
    assert record.active(0, 105.1, 5.0) is False
    assert record.active(0, 90.0, 5.0) is False  # from the future
    assert record.decision(LEVELS, 1000.0) == Decision(2, 4)


def test_liveness_is_asked_at_a_bounded_rate(
    record: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def counted(pid: int) -> int | None:
        asked.append(pid)
        return start_ticks(pid)

    record.claim(0, LEVELS).publish(STATE, 10.0)
    monkeypatch.setattr(module, "start_ticks", counted)
    for tick in range(3000):
        assert record.active(0, 10.0 + tick / 1000, 60.0) is True
        assert record.decision(LEVELS, 10.0 + tick / 1000) is not None
    assert len(asked) == 3


WRITES = """
    slot = Monitor.attach().claim(1, LEVELS)
    slot.publish(State(True, 1.0, 2, 1, 4, 0.5, 1.0), time.monotonic())
    print(os.getpid(), flush=True)
    """


def test_a_stage_that_was_killed_is_inactive_and_makes_room(record: Monitor) -> None:
    process = stage(WRITES + "sys.stdin.read()")
    assert line(process) == str(process.pid)
    now_s = time.monotonic()
    assert record.active(1, now_s, 60.0) is True
    with pytest.raises(MonitorError, match=f"process {process.pid} has it"):
        record.claim(1, LEVELS)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie is dead, too
    assert record.active(1, now_s + module.LIVENESS_S, 60.0) is False
    process.communicate()
    assert record.active(1, now_s + 2.0, 60.0) is False
    record.claim(1, LEVELS).publish(STATE, now_s)
    assert record.active(1, now_s, 60.0) is True


def test_a_process_id_that_lives_again_is_another_process(record: Monitor) -> None:
    record.claim(0, LEVELS)._start_ticks -= 1
    slot = record.claim(0, LEVELS)
    slot._start_ticks -= 1
    slot.publish(STATE, 1.0)
    assert record.active(0, 1.0, 60.0) is False
    assert record.decision(LEVELS, 1.0) is None


def test_a_writer_killed_at_any_moment_leaves_a_whole_slot(record: Monitor) -> None:
    endless = """
    while True:
        for level in range(3):
            slot.publish(State(True, float(level), level, level, level, None, None), 1.0)
    """
    for attempt in range(5):
        process = stage(WRITES + endless)
        line(process)
        time.sleep(0.02 + attempt / 97)
        kill(process)
        assert (reading := record.read(1)) is not None
        assert reading.state.requested == reading.state.applied == reading.state.epoch
        assert record.active(1, 1.0, 60.0) is False


def test_half_a_write_is_unknown_until_its_writer_is_dead_or_silent(record: Monitor) -> None:
    """Not by our writer, whose one write a signal cannot cut: by one that stores word by word."""
    half = """
    shared = mmap.mmap(os.open(module.DIRECTORY / os.environ[VARIABLE], os.O_RDWR), 0)
    sys.stdin.readline()
    shared[512:528] = bytes(16)  # sequence and pid
    print("half", flush=True)
    sys.stdin.readline()
    """
    process = stage(WRITES + half)
    line(process)
    now_s = time.monotonic()
    assert record.active(1, now_s, 60.0) is True
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert line(process) == "half"
    assert record.read(1) is None
    assert record.active(1, now_s, 60.0) is None
    assert record.active(1, now_s + 61.0, 60.0) is False
    assert Monitor.attach().active(1, now_s, 60.0) is None  # never saw the writer
    kill(process)
    assert record.active(1, now_s + 63.0, 90.0) is False
    record.claim(1, LEVELS).publish(STATE, now_s)
    assert record.active(1, now_s, 60.0) is True


def test_the_next_start_replaces_what_a_crashed_server_left(directory: Path) -> None:
    process = stage("Monitor.create(); print(os.environ[VARIABLE], flush=True); sys.stdin.read()")
    name = line(process)
    Monitor.attach(name).close()
    kill(process)
    assert (directory / name).exists()
    with pytest.raises(MonitorError, match="dead server"):
        Monitor.attach(name)
    # One of its process id, as after a restart of the machine's only container.
    (directory / f"{module.PREFIX}{os.getpid()}").write_bytes((directory / name).read_bytes())
    (directory / f".{module.PREFIX}{os.getpid()}").write_bytes(b"interrupted")
    record = Monitor.create()
    assert [path.name for path in directory.iterdir()] == [record.path.name]
    assert record.read(0) is None
    record.close()


def test_the_sweep_leaves_the_living_and_other_names_alone(directory: Path) -> None:
    process = stage("Monitor.create(); print(os.environ[VARIABLE], flush=True); sys.stdin.read()")
    name = line(process)
    (directory / "horizonserve-123-456").touch()
    (directory / f"{module.PREFIX}12x").touch()
    (directory / f"{module.PREFIX}1").write_bytes(b"another version, of a living process")
    (directory / f".{module.PREFIX}1").touch()
    before = sorted(directory.iterdir())
    for unfinished in ("", "."):  # above every process id
        (directory / f"{unfinished}{module.PREFIX}4194304").touch()
    sweep()
    assert sorted(directory.iterdir()) == before
    kill(process)
    sweep()
    assert sorted(directory.iterdir()) == [path for path in before if path.name != name]


def test_two_servers_do_not_see_each_other(record: Monitor, directory: Path) -> None:
    code = """
    record = Monitor.create()  # though it inherits the name of ours
    record.claim(0, LEVELS).publish(State(requested=1), time.monotonic())
    print(record.path.name, flush=True)
    sys.stdin.read()
    """
    process = stage(code)
    name = line(process)
    slot = record.claim(0, LEVELS)
    slot.publish(State(requested=2), 1.0)
    assert (directory / name).exists()
    assert name != record.path.name
    assert record.decision(LEVELS, 1.0) == Decision(2, 0)
    other = Monitor.attach(name)
    assert other.decision(LEVELS, 1.0) == Decision(1, 0)
    # A slot of the other record is not believed in ours.
    record.path.write_bytes(
        record.path.read_bytes()[:SLOT_AT] + (directory / name).read_bytes()[SLOT_AT:]
    )
    assert record.read(0) is None
    other.close()
    process.communicate()  # its end is the end of its record
    assert not (directory / name).exists()
    assert record.path.exists()


@pytest.mark.parametrize("name", ["", "..", "x", "horizonserve-monitor-1-2", None])
def test_a_name_that_is_none_of_ours_is_refused(name: str | None) -> None:
    with pytest.raises(MonitorError):
        Monitor.attach(name)
    with pytest.raises(MonitorError):
        Monitor.attach(f"{module.PREFIX}../{os.getpid()}")


def damage_version(content: bytearray) -> None:
    struct.pack_into("=I", content, 8, 2)
    struct.pack_into("=I", content, 40, zlib.crc32(content[:40]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_version, "version 1"),
        (lambda content: content.__setitem__(0, 0), "version 1"),
        (lambda content: content.__setitem__(33, content[33] ^ 1), "damaged"),
        (lambda content: content.__delitem__(slice(100, None)), "100 bytes"),
        (lambda content: content.clear(), "0 bytes"),
        (lambda content: content.__setitem__(slice(None), os.urandom(len(content))), "version 1"),
        (lambda content: content.__setitem__(slice(None), bytes(len(content))), "version 1"),
    ],
)
def test_a_damaged_record_is_not_attached_to(record: Monitor, damage: Any, message: str) -> None:
    content = bytearray(record.path.read_bytes())
    damage(content)
    record.path.write_bytes(content)
    with pytest.raises(MonitorError, match=message):
        Monitor.attach()


@pytest.mark.parametrize("size", [0, 100, 256, 300, 491])
def test_a_record_cut_short_while_in_use_is_unknown_until_the_next_write(
    record: Monitor, size: int
) -> None:
    slot = record.claim(0, LEVELS)
    slot.publish(STATE, 1.0)
    assert record.active(0, 1.0, 60.0) is True
    os.truncate(record.path, size)
    assert record.read(0) is None
    assert record.active(0, 1.0, 60.0) is None
    assert record.active(3, 1.0, 60.0) is None
    assert record.decision(LEVELS, 1.0) is None
    assert slot.publish(STATE, 1.0)
    assert record.decision(LEVELS, 1.0) == Decision(2, 4)


def test_zeros_where_a_cut_record_grew_again_are_no_free_slot(record: Monitor) -> None:
    record.claim(0, LEVELS).publish(STATE, 1.0)
    last = record.claim(7, LEVELS)
    os.truncate(record.path, 0)
    last.publish(STATE, 1.0)
    assert record.active(7, 1.0, 60.0) is True
    for index in range(7):
        assert record.read(index) is None
        assert record.active(index, 1.0, 60.0) is None


def test_a_stage_that_leaves_frees_its_slot(record: Monitor) -> None:
    slot = record.claim(0, LEVELS)
    slot.publish(STATE, 1.0)
    slot.close()
    assert record.read(0) is None
    assert record.active(0, 1.0, 60.0) is False
    assert record.decision(LEVELS, 1.0) is None


def check(record: Monitor) -> bool:
    """Whether the slots are read as written, or in any case as something that can be."""
    for index in range(module.MAX_STAGES):
        reading = record.read(index)
        if reading is not None:
            for level in (reading.state.requested, reading.state.applied):
                assert level is None or 0 <= level < len(reading.levels)
        assert record.active(index, 1.0, 60.0) in (True, False, None)
    chosen = record.decision(LEVELS, 1.0)
    assert chosen is None or 0 <= chosen.level < len(LEVELS)
    return chosen == Decision(2, 4)


def test_a_hundred_thousand_corruptions(record: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random bytes at random places; every tenth time with the checksum of a slot made right."""
    monkeypatch.setattr(module, "start_ticks", lambda pid: 1)  # 800,000 looks into /proc
    slot = record.claim(0, LEVELS)
    slot.publish(STATE, 1.0)
    record.veto("stage 1: a reason")
    whole = record.path.read_bytes()
    end = SLOT_AT + module._USED
    draw = random.Random(5)
    believed = 0
    with open(record.path, "r+b", buffering=0) as file:
        for attempt in range(100_000):
            damaged = bytearray(whole)
            for _ in range(draw.choice((1, 2, 8, 64))):
                at = draw.randrange(SLOT_AT, end) if draw.random() < 0.9 else draw.randrange(end)
                damaged[at] ^= draw.randrange(1, 256)
            sealed = attempt % 10 == 0
            if sealed:
                damaged[end - 12 : end - 4] = damaged[SLOT_AT : SLOT_AT + 8]
                crc = zlib.crc32(damaged[SLOT_AT : end - 4], record.seed)
                struct.pack_into("=I", damaged, end - 4, crc)
            os.pwrite(file.fileno(), damaged, 0)
            reading = record.read(0)
            if reading is not None:
                levels = (reading.state.requested, reading.state.applied)
                assert all(at is None or 0 <= at < len(reading.levels) for at in levels)
                assert sealed or damaged[SLOT_AT:end] == whole[SLOT_AT:end]
                believed += sealed
            chosen = record.decision(LEVELS, 1.0)
            assert chosen is None or 0 <= chosen.level < len(LEVELS)
            assert record.active(0, 1.0, 60.0, 0.1) in (True, False, None)
            assert record.vetoed() in ("stage 1: a reason", None)
    assert believed > 100  # else the seals were wrong and only the checksum was tested
    os.truncate(record.path, 0)
    record.path.write_bytes(whole)
    assert check(record)


#: Every field says the same number, so that a mix of two writes shows.
AGREE = "State(bool(i & 1), float(i), i % 3, i % 3, i, float(i), float(i)), float(i)"
TEAR = f"""
    slot = Monitor.attach().claim(1, LEVELS)
    shared = mmap.mmap(os.open(module.DIRECTORY / os.environ[VARIABLE], os.O_RDWR), 0)
    words, at = memoryview(shared).cast("I"), 512 // 4
    written = []
    os.pwrite, honest = (lambda file, body, at: written.append(body) or len(body)), os.pwrite
    print("ready", flush=True)
    end, i = time.monotonic() + 3, 0
    while time.monotonic() < end:
        i += 1
        slot.publish({AGREE})
        body = written.pop()
        for k, word in enumerate(memoryview(body).cast("I")):
            words[at + k] = word
    """
HONEST = f"""
    slot = Monitor.attach().claim(1, LEVELS)
    print("ready", flush=True)
    end, i = time.monotonic() + 3, 0
    while time.monotonic() < end:
        i += 1
        slot.publish({AGREE})
    """


def race(record: Monitor, writer: str) -> tuple[int, int, int]:
    """Read while another process writes: how many reads were consistent, mixed, and unknown."""
    process = stage(writer)
    assert line(process) == "ready"
    consistent = mixed = unknown = 0
    while process.poll() is None:
        for _ in range(500):
            reading = record.read(1)
            if reading is None:
                unknown += 1
                continue
            i, state = int(reading.updated_s), reading.state
            if i and state != State(bool(i & 1), i, i % 3, i % 3, i, i, i):
                mixed += 1
            else:
                consistent += 1
    process.communicate()
    return consistent, mixed, unknown


def test_reads_race_with_writes(record: Monitor) -> None:
    consistent, mixed, unknown = race(record, HONEST)
    assert mixed == 0
    assert consistent > 1000
    assert unknown <= consistent / 1000


def test_no_mix_is_believed_of_a_writer_that_stores_word_by_word(record: Monitor) -> None:
    consistent, mixed, _ = race(record, TEAR)
    assert mixed == 0
    assert consistent > 0


def test_the_race_would_show_a_mix(record: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same race against a reader that checks neither sequences nor checksum must fail."""
    unchecked = module._SLOT

    class Believing:
        @staticmethod
        def unpack(slot: bytes) -> tuple[Any, ...]:
            fields = unchecked.unpack(slot)
            return (*fields[:-2], fields[0], zlib.crc32(slot[:-4], record.seed))

    monkeypatch.setattr(module, "_SLOT", Believing)
    _, mixed, _ = race(record, TEAR)
    assert mixed > 0
