"""What the stage processes of one server tell each other: a file in /dev/shm (section 5).

One record per server, mode 0600. The launching process creates it and puts its name into the
environment before it starts the stages; each stage claims its slot, writes that one only and reads
the others. Layout (native byte order: it never leaves the machine):

    0     magic 8s | layout u32 | slots u32 | creator pid u64 | creator start ticks u64 |
          nonce u64 | crc32 u32
    48    veto: crc32 u32 | length u16 | why no stage is to be capped, UTF-8
    256   8 slots of 256 bytes:
          sequence u64 | pid u64 | start ticks u64 | active u64 | updated f64 | last forward f64 |
          requested i64 | applied i64 | epoch u64 | pressure f64 | its time f64 |
          8 levels: shared SMs u32, downstream SMs u32, fingerprint u64 | levels u64 |
          sequence again u64 | crc32 u32

A slot is believed only if both sequences agree and the checksum is right. The checksum starts from
that of the header, so a slot of another record, layout or byte order is never believed; and every
value is checked against its range, so a level is always one of the ladder that came with it.

Why a file that is read and written, not mapped: a map of a file that somebody truncates kills the
process (SIGBUS), and a size check before each access costs as much as the read and leaves a gap.
pread of a short file is just short. A slot lies within one page and is written by one pwrite, which
a signal cannot cut; a reader on another core may still see a mix of two writes (one in a million
was), on any memory order, and the sequences and the checksum find it. So the sequence need not be
odd while a write goes on, a writer that dies leaves nothing half done, and each write heals a slot
that was damaged. Like every torch operation, these system calls let go of the GIL.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import math
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from horizonserve.process import pid_namespace, start_ticks
from horizonserve.shared_file import make
from horizonserve.spatial.ladder import Level

#: Names the record of the server whose processes inherit it.
VARIABLE: Final = "HORIZONSERVE_MONITOR"
DIRECTORY: Final = Path("/dev/shm")
PREFIX: Final = f"horizonserve-monitor-{pid_namespace()}-"

SHARED_STAGE: Final = 0
MAX_STAGES: Final = 8
MAX_LEVELS: Final = 8
#: How long a death may go unnoticed: /proc is asked once in this time per slot, not at each read.
LIVENESS_S: Final = 1.0

_MAGIC: Final = b"HSMONITR"
_LAYOUT: Final = 1
_HEAD: Final = struct.Struct("=8sIIQQQ")
_HEAD_SIZE: Final = _HEAD.size + 4
_CRC: Final = struct.Struct("=I")
_LEVEL: Final = struct.Struct("=IIQ")
#: All levels and how many there are: a reader remembers what the last such bytes meant.
_LADDER: Final = struct.Struct("=" + "IIQ" * MAX_LEVELS + "Q")
_BODY: Final = struct.Struct(f"=QQQQddqqQdd{_LADDER.size}sQ")
_VETO: Final = struct.Struct("=IH")
_VETO_AT: Final = 48
_SLOT: Final = struct.Struct(_BODY.format + "I")
_USED: Final = _SLOT.size
_STRIDE: Final = 256
_SIZE: Final = _STRIDE * (1 + MAX_STAGES)
_VETO_ROOM: Final = _STRIDE - _VETO_AT - _VETO.size
_READS: Final = 4
_MAX_PID: Final = 1 << 22
_UNKNOWN: Final = math.nan

assert _USED <= _STRIDE and _SIZE <= 4096


class MonitorError(RuntimeError):
    """No usable record, or the slot belongs to another process."""


class State(NamedTuple):
    """What a stage says of itself. Times are seconds on the monotonic clock; None is unknown."""

    #: A forward with work is running or queued.
    active: bool = False
    last_forward_s: float | None = None
    #: Level that the stage decided on (the shared one, for all) or was asked for, and uses.
    requested: int | None = None
    applied: int | None = None
    #: Counts the changes of the decided level; a stage that follows repeats the one it follows.
    epoch: int = 0
    pressure: float | None = None
    pressure_at_s: float | None = None


class Reading(NamedTuple):
    """A whole and valid slot."""

    pid: int
    start_ticks: int
    updated_s: float
    levels: tuple[Level, ...]
    state: State


class Decision(NamedTuple):
    """The level that the shared stage chose, and which change of it this is."""

    level: int
    epoch: int


@dataclass(slots=True)
class _Known:
    """What a reader remembers of a slot: its last writer, and when that was last seen to live."""

    pid: int = 0
    start_ticks: int = 0
    updated_s: float = -math.inf
    checked_s: float = -math.inf
    alive: bool = False


class Slot:
    """The writing end of one stage."""

    def __init__(self, monitor: Monitor, stage: int, levels: Sequence[Level]) -> None:
        """See `Monitor.claim`."""
        flat = [value for level in levels for value in level]
        # The monitor, not its file number: that may be another file's once it is closed.
        self._monitor, self._at = monitor, _slot_at(stage)
        self._levels = len(levels)
        self.ladder = _LADDER.pack(*flat, *[0] * (3 * (MAX_LEVELS - len(levels))), len(levels))
        self._pid = os.getpid()
        self._start_ticks = start_ticks(self._pid) or 0
        self._sequence = 0

    def publish(self, state: State, now_s: float) -> bool:
        """Write the slot. Never blocks on a reader.

        Returns:
            Whether it was written: not if the file system is full or the record closed.

        Raises:
            ValueError: a level outside the ladder, an epoch below 0.
        """
        active, forward_s, requested, applied, epoch, pressure, pressure_at_s = state
        requested = -1 if requested is None else requested
        applied = -1 if applied is None else applied
        if not (-1 <= requested < self._levels and -1 <= applied < self._levels and epoch >= 0):
            raise ValueError(f"{state}: levels 0 to {self._levels - 1}, epoch from 0")
        self._sequence = sequence = self._sequence + 1
        body = _BODY.pack(
            sequence,
            self._pid,
            self._start_ticks,
            active,
            now_s,
            _UNKNOWN if forward_s is None else forward_s,
            requested,
            applied,
            epoch,
            _UNKNOWN if pressure is None else pressure,
            _UNKNOWN if pressure_at_s is None else pressure_at_s,
            self.ladder,
            sequence,
        )
        body += _CRC.pack(zlib.crc32(body, self._monitor.seed))
        try:
            return os.pwrite(self._monitor.file, body, self._at) == _USED
        except OSError:
            return False

    def close(self) -> None:
        """Give the slot back: nobody waits for a stage that left."""
        with contextlib.suppress(OSError):
            os.pwrite(self._monitor.file, self._monitor.free, self._at)


class Monitor:
    """The record of one server, open in one process. One thread at a time uses it."""

    def __init__(self, path: Path, file: int, created: bool) -> None:
        """See `create` and `attach`."""
        self.path = path
        #: The open file, -1 once closed, and where the checksums of its slots start.
        self.file = file
        self._creator = os.getpid() if created else None
        self.seed = _believed(os.pread(file, _SIZE, 0), path)
        #: A slot that nobody has.
        self.free = _free_slot(self.seed)
        self._known = [_Known() for _ in range(MAX_STAGES)]
        self._ladders: dict[bytes, tuple[Level, ...]] = {}

    @classmethod
    def create(cls) -> Monitor:
        """Make the record of the server that this process launches, before it starts the stages.

        Sets the environment variable that they find it by, replaces what a dead process of the same
        id left, and removes the records of other dead ones.

        Raises:
            OSError: /dev/shm cannot be written.
        """
        sweep()
        pid = os.getpid()
        nonce = int.from_bytes(os.urandom(8), "little")
        head = _HEAD.pack(_MAGIC, _LAYOUT, MAX_STAGES, pid, start_ticks(pid) or 0, nonce)
        path = DIRECTORY / f"{PREFIX}{pid}"
        seed = zlib.crc32(head)
        slots = _free_slot(seed).ljust(_STRIDE, b"\0") * MAX_STAGES
        file = make(path, (head + _CRC.pack(seed)).ljust(_STRIDE, b"\0") + slots)
        try:
            monitor = cls(path, file, created=True)
        except BaseException:
            os.close(file)
            raise
        os.environ[VARIABLE] = path.name
        atexit.register(monitor.close)
        return monitor

    @classmethod
    def attach(cls, name: str | None = None) -> Monitor:
        """Open the record of the server that this process belongs to.

        Args:
            name: of the record; by default what the environment says.

        Raises:
            MonitorError: there is none, or it is damaged, of another version or of a dead server.
        """
        name = os.environ.get(VARIABLE, "") if name is None else name
        if not name.startswith(PREFIX) or not name.removeprefix(PREFIX).isdecimal():
            raise MonitorError(f"{VARIABLE}={name!r}: not the name of a monitor record")
        path = DIRECTORY / name
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise MonitorError(f"{path}: {error.strerror}") from error
        try:
            return cls(path, file, created=False)
        except BaseException:
            os.close(file)
            raise

    def claim(self, stage: int, levels: Sequence[Level]) -> Slot:
        """Take the slot of a stage for this process.

        Args:
            stage: its index in the pipeline.
            levels: its ladder, lowest first; shown with everything it writes.

        Raises:
            MonitorError: a living process has it, or there is no such slot, or too many levels.
        """
        if not 0 <= stage < MAX_STAGES or len(levels) > MAX_LEVELS:
            raise MonitorError(f"stage {stage} with {len(levels)} levels: at most {MAX_STAGES}, 8")
        fcntl.flock(self.file, fcntl.LOCK_EX)  # among those who claim; nobody else locks
        try:
            held = self.read(stage)
            if (
                held is not None
                and held.pid != os.getpid()
                and held.start_ticks == start_ticks(held.pid)
            ):
                raise MonitorError(f"stage {stage} of {self.path.name}: process {held.pid} has it")
            slot = Slot(self, stage, levels)
            self._ladders[slot.ladder] = tuple(levels)  # the same object: quick to compare
            if not slot.publish(State(), 0.0):
                raise MonitorError(f"{self.path}: cannot be written")
            return slot
        finally:
            fcntl.flock(self.file, fcntl.LOCK_UN)

    def read(self, stage: int) -> Reading | None:
        """What a stage wrote last, or None where no whole and valid slot is. Never raises."""
        return self._read(stage)[0]

    def _read(self, stage: int) -> tuple[Reading | None, bytes]:
        at, slot = _slot_at(stage), b""
        for _ in range(_READS):
            try:
                slot = os.pread(self.file, _USED, at)
            except OSError:
                return None, b""
            if len(slot) != _USED:
                return None, b""
            if slot == self.free:
                return None, slot
            fields = _SLOT.unpack(slot)
            if fields[0] == fields[-2] and fields[-1] == zlib.crc32(slot[:-4], self.seed):
                return self._decode(*fields), slot
        return None, slot

    def _decode(
        self,
        _sequence: int,
        pid: int,
        started: int,
        active: int,
        updated_s: float,
        forward_s: float,
        requested: int,
        applied: int,
        epoch: int,
        pressure: float,
        pressure_at_s: float,
        ladder: bytes,
        *_tail: int,
    ) -> Reading | None:
        levels = self._ladders.get(ladder)
        if levels is None:
            levels = self._learn(ladder)
        count = len(levels)
        if not (-1 <= requested < count and -1 <= applied < count):
            return None
        # x - x is 0 for finite numbers only.
        if active > 1 or pid > _MAX_PID or updated_s - updated_s != 0.0:
            return None
        return Reading(
            pid,
            started,
            updated_s,
            levels,
            State(
                active == 1,
                forward_s if forward_s - forward_s == 0.0 else None,
                None if requested < 0 else requested,
                None if applied < 0 else applied,
                epoch,
                pressure if pressure - pressure == 0.0 else None,
                pressure_at_s if pressure_at_s - pressure_at_s == 0.0 else None,
            ),
        )

    def _learn(self, ladder: bytes) -> tuple[Level, ...]:
        *_, count = _LADDER.unpack(ladder)
        levels = tuple(map(Level._make, _LEVEL.iter_unpack(ladder[:-8])))[:count]
        if len(self._ladders) > MAX_STAGES:  # stages were restarted with other ladders
            self._ladders.clear()
        self._ladders[ladder] = levels
        return levels

    def veto(self, reason: str) -> None:
        """Say, for all processes of the server, that no stage is to be capped. The first one stays.

        Args:
            reason: for people; cut to what the record has room for.
        """
        text = reason.encode()[:_VETO_ROOM].decode(errors="ignore").encode()
        content = _VETO.pack(zlib.crc32(text, self.seed), len(text)) + text
        if self.file < 0:
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self.file, fcntl.LOCK_EX)
            try:
                if self.vetoed() is None:
                    os.pwrite(self.file, content, _VETO_AT)
            finally:
                fcntl.flock(self.file, fcntl.LOCK_UN)

    def vetoed(self) -> str | None:
        """The reason that a process gave to `veto`. Never raises."""
        try:
            content = os.pread(self.file, _STRIDE - _VETO_AT, _VETO_AT)
        except OSError:
            return None
        if len(content) < _VETO.size:
            return None
        checksum, length = _VETO.unpack_from(content)
        text = content[_VETO.size : _VETO.size + length]
        if not text or checksum != zlib.crc32(text, self.seed):
            return None
        return text.decode(errors="replace")

    def active(
        self, stage: int, now_s: float, silence_s: float, linger_s: float = 0.0
    ) -> bool | None:
        """Whether a stage has work. Never raises.

        Args:
            stage: its index in the pipeline.
            now_s: the monotonic clock.
            silence_s: a stage that wrote nothing for longer counts as inactive. More than its
                longest forward.
            linger_s: a stage still counts as active for so long after its last forward.

        Returns:
            False for a slot that nobody claimed, a dead writer (after `LIVENESS_S` at the latest)
            and a silent one. None where the slot is unreadable and its last known writer is neither
            dead nor silent, or no writer was ever known: the caller holds its level.
        """
        reading, slot = self._read(stage)
        known = self._known[stage]
        if reading is None:
            if slot == self.free:
                return False
            if not known.pid:
                return None
        elif not self._writer_lives(known, reading, now_s):
            return False
        if abs(now_s - known.updated_s) > silence_s:
            return False  # a time in the future is no sign of life either
        if reading is not None:
            state = reading.state
            if state.active or state.last_forward_s is None:
                return state.active
            return now_s - state.last_forward_s < linger_s
        return None if self._lives(known, now_s) else False

    def decision(self, levels: Sequence[Level], now_s: float) -> Decision | None:
        """The level that the shared stage decided on. Never raises.

        None where there is no valid one, the shared stage is dead, or its ladder is not the
        caller's, so that the same index would mean another split: the caller holds its level.
        A shared stage that has been silent has changed nothing, so its last decision stands.
        """
        reading = self.read(SHARED_STAGE)
        if reading is None or reading.state.requested is None or reading.levels != tuple(levels):
            return None
        if not self._writer_lives(self._known[SHARED_STAGE], reading, now_s):
            return None
        return Decision(reading.state.requested, reading.state.epoch)

    def disagreeing(self, levels: Sequence[Level]) -> list[int]:
        """The stages whose ladder, as they last wrote it, is not this one."""
        own = tuple(levels)
        readings = ((stage, self.read(stage)) for stage in range(MAX_STAGES))
        return [stage for stage, seen in readings if seen is not None and seen.levels != own]

    def _writer_lives(self, known: _Known, reading: Reading, now_s: float) -> bool:
        if known.pid != reading.pid or known.start_ticks != reading.start_ticks:
            known.pid, known.start_ticks = reading.pid, reading.start_ticks
            known.checked_s = -math.inf
        known.updated_s = reading.updated_s
        return self._lives(known, now_s)

    def _lives(self, known: _Known, now_s: float) -> bool:
        if not 0 <= now_s - known.checked_s < LIVENESS_S:
            known.checked_s = now_s
            known.alive = known.start_ticks == start_ticks(known.pid)
        return known.alive

    def close(self) -> None:
        """Close the record, and remove it where it was created. Safe to call again."""
        if self.file < 0:
            return
        atexit.unregister(self.close)
        if self._creator == os.getpid():  # not in a forked child
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(self.file), self.path.lstat()):
                    self.path.unlink()
            if os.environ.get(VARIABLE) == self.path.name:
                del os.environ[VARIABLE]
        os.close(self.file)
        self.file = -1


def _slot_at(stage: int) -> int:
    return _STRIDE * (1 + stage)


def _free_slot(seed: int) -> bytes:
    # With a checksum: plain zeros are what is read where a file was cut and grew again.
    zeros = bytes(_USED - 4)
    return zeros + _CRC.pack(zlib.crc32(zeros, seed))


def _believed(content: bytes, path: Path) -> int:
    """Checksum of a record's header, which those of its slots start from.

    Raises:
        MonitorError: it is not a record of this version and of a living server.
    """
    if len(content) != _SIZE:
        raise MonitorError(f"{path}: {len(content)} bytes, not {_SIZE}")
    magic, layout, slots, pid, started, _ = _HEAD.unpack_from(content)
    (checksum,) = _CRC.unpack_from(content, _HEAD.size)
    if magic != _MAGIC or layout != _LAYOUT or slots != MAX_STAGES:
        raise MonitorError(f"{path}: not a monitor record of version {_LAYOUT}")
    if checksum != zlib.crc32(content[: _HEAD.size]):
        raise MonitorError(f"{path}: damaged")
    if path.name != f"{PREFIX}{pid}" or started != start_ticks(pid):
        raise MonitorError(f"{path}: left by a dead server")
    return int(checksum)


def sweep() -> None:
    """Remove this user's records, whole or not, whose creator is gone."""
    for path in (*DIRECTORY.glob(f"{PREFIX}[0-9]*"), *DIRECTORY.glob(f".{PREFIX}[0-9]*")):
        with contextlib.suppress(OSError, ValueError):
            status = path.lstat()
            pid = int(path.name.removeprefix(".").removeprefix(PREFIX))
            if status.st_uid == os.getuid() and not _claimed(path, pid):
                path.unlink()


def _claimed(path: Path, pid: int) -> bool:
    """Whether a living process can be what made this file."""
    started = start_ticks(pid)
    if started is None:
        return False
    content = path.read_bytes()
    try:
        _believed(content, path)
    except MonitorError:
        # Another version's, or damaged: its name says who has it, and that process may use it.
        return not content.startswith(_MAGIC) or _HEAD.unpack_from(content)[4] == started
    return True
