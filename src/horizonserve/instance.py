"""The record of a running instance: a small shared file that switches its policy live.

One file per scheduler process in /dev/shm, mode 0600, made by the scheduler and gone with it. The
command line writes settings into it; the scheduler looks at one counter per step and never
blocks. Layout (little endian, fixed):

    0    magic 8s | layout u32 | pid u32 | process start time (clock ticks since boot) u64
    24   request sequence u64 (odd while being written) | length u32 | crc32 u32
    40   applied sequence u64 | outcome u32 (0 applied, 1 refused)
    56   counters: 11 x u64 (see Counters)
    144  identity: JSON, padded with zeros
    1024 request: JSON of the settings that were asked for

A record is believed only if magic, layout, length and checksum are right and its process lives
with the same start time; anything else is a leftover, which the next start removes. Containers may
share /dev/shm but not process ids, so the name holds the process-id namespace, and each namespace
sees and sweeps its own records only.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from horizonserve.config import Settings
from horizonserve.process import pid_namespace, start_ticks
from horizonserve.shared_file import make

DIRECTORY: Final = Path("/dev/shm")
PREFIX: Final = f"horizonserve-{pid_namespace()}-"
SIZE: Final = 16_384

_MAGIC: Final = b"HORIZON\0"
_LAYOUT: Final = 2
_HEAD: Final = struct.Struct("<8sIIQ")
_REQUEST: Final = struct.Struct("<QII")
_REQUEST_AT: Final = 24
_SEQUENCE: Final = struct.Struct("<Q")
_APPLIED: Final = struct.Struct("<QI")
_APPLIED_AT: Final = 40
_COUNTERS: Final = struct.Struct("<11Q")
_COUNTERS_AT: Final = 56
_IDENTITY_AT: Final = 144
_BODY_AT: Final = 1024


class Counters(NamedTuple):
    """What the scheduler did; the first six since its start, the others in its last step."""

    #: Steps taken, and among them those that had no free slot for a request that waited, and
    #: those that hid one.
    steps: int = 0
    full_steps: int = 0
    hiding_steps: int = 0
    #: Requests that the policy let in, and the long ones among them.
    admitted: int = 0
    admitted_long: int = 0
    #: Requests that sat out a step, counted once for each.
    lent: int = 0
    waiting: int = 0
    running: int = 0
    #: Requests that advanced; 0 where slots are not lent.
    advanced: int = 0
    protected: int = 0
    lost: int = 0


class InstanceError(RuntimeError):
    """No such live instance, or its record is unusable."""


class Record:
    """The scheduler's end: made at start, polled once per step, removed at shutdown."""

    def __init__(self, settings: Settings, identity: dict[str, Any]) -> None:
        """Create the record of this process and sweep those of dead ones.

        ``identity`` is for people and scripts: model, stage, limits. It must fit its 880 bytes.
        """
        sweep()
        pid = os.getpid()
        name = json.dumps(identity).encode()
        if len(name) > _BODY_AT - _IDENTITY_AT:
            raise ValueError(f"identity: {len(name)} bytes of JSON, at most 880 fit")
        self.path = DIRECTORY / f"{PREFIX}{pid}"
        buffer = bytearray(SIZE)
        _HEAD.pack_into(buffer, 0, _MAGIC, _LAYOUT, pid, start_ticks(pid) or 0)
        buffer[_IDENTITY_AT : _IDENTITY_AT + len(name)] = name
        _put_request(buffer, settings, 2)
        _APPLIED.pack_into(buffer, _APPLIED_AT, 2, 0)
        with open(make(self.path, buffer), "r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        self._seen = 2
        atexit.register(self.close)  # for owners that end without saying so

    def poll(self) -> Settings | None:
        """New settings, once, when somebody asked for some. Never blocks, never raises."""
        (sequence,) = _SEQUENCE.unpack_from(self._map, _REQUEST_AT)
        if sequence == self._seen or sequence & 1:
            return None
        settings = _get_request(self._map)
        if settings is None and _SEQUENCE.unpack_from(self._map, _REQUEST_AT)[0] != sequence:
            return None  # torn by a second writer; its sequence will be seen next time
        self._seen = sequence
        _APPLIED.pack_into(self._map, _APPLIED_AT, sequence, settings is None)
        return settings

    def publish(self, counters: Counters) -> None:
        """Show what the scheduler did."""
        _COUNTERS.pack_into(self._map, _COUNTERS_AT, *counters)

    def close(self) -> None:
        """Remove the record; safe to call again."""
        atexit.unregister(self.close)
        self.path.unlink(missing_ok=True)


def _put_request(buffer: bytearray | mmap.mmap, settings: Settings, sequence: int) -> None:
    body = settings.model_dump_json(exclude_unset=True).encode()
    assert len(body) <= SIZE - _BODY_AT  # every field is bounded; all of them set fill a quarter
    _SEQUENCE.pack_into(buffer, _REQUEST_AT, sequence - 1)
    buffer[_BODY_AT : _BODY_AT + len(body)] = body
    _REQUEST.pack_into(buffer, _REQUEST_AT, sequence - 1, len(body), zlib.crc32(body))
    _SEQUENCE.pack_into(buffer, _REQUEST_AT, sequence)


def _get_request(buffer: bytes | mmap.mmap) -> Settings | None:
    _, length, checksum = _REQUEST.unpack_from(buffer, _REQUEST_AT)
    body = bytes(buffer[_BODY_AT : _BODY_AT + min(length, SIZE - _BODY_AT)])
    if len(body) != length or zlib.crc32(body) != checksum:
        return None
    try:
        return Settings().changed(json.loads(body))
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Instance:
    """A live instance as the command line sees it."""

    pid: int
    identity: dict[str, Any]
    settings: Settings
    counters: Counters
    applied: bool

    @property
    def path(self) -> Path:
        return DIRECTORY / f"{PREFIX}{self.pid}"


def _read(path: Path) -> Instance | None:
    """The instance behind a record, or None for a leftover, a foreign or a torn file."""
    try:
        buffer = path.read_bytes()
    except OSError:
        return None
    if len(buffer) != SIZE:
        return None
    magic, layout, pid, started = _HEAD.unpack_from(buffer, 0)
    if magic != _MAGIC or layout != _LAYOUT or started != start_ticks(pid):
        return None
    settings = _get_request(buffer)
    try:
        identity = json.loads(buffer[_IDENTITY_AT:_BODY_AT].rstrip(b"\0"))
    except ValueError:
        return None
    if settings is None or path.name != f"{PREFIX}{pid}":
        return None
    (sequence,) = _SEQUENCE.unpack_from(buffer, _REQUEST_AT)
    applied, refused = _APPLIED.unpack_from(buffer, _APPLIED_AT)
    return Instance(
        pid=pid,
        identity=identity,
        settings=settings,
        counters=Counters(*_COUNTERS.unpack_from(buffer, _COUNTERS_AT)),
        applied=applied == sequence and not refused,
    )


def _records() -> Iterator[Path]:
    return iter(sorted(DIRECTORY.glob(f"{PREFIX}[0-9]*")))


def live() -> list[Instance]:
    """The live instances of this user, oldest process id first."""
    return [instance for path in _records() if (instance := _read(path)) is not None]


def sweep() -> None:
    """Remove records of this layout whose process is gone."""
    for path in _records():
        with contextlib.suppress(OSError):
            head = path.read_bytes()[: _HEAD.size]
            if len(head) == _HEAD.size:
                magic, _, pid, started = _HEAD.unpack(head)
                if magic == _MAGIC and started == start_ticks(pid):
                    continue
            if path.stat().st_uid == os.getuid():
                path.unlink()


def find(pid: int | None = None) -> Instance:
    """The instance of a process, or the only one.

    Raises:
        InstanceError: there is none, or several and no pid was given.
    """
    instances = live()
    if pid is not None:
        instances = [instance for instance in instances if instance.pid == pid]
    if len(instances) == 1:
        return instances[0]
    if not instances:
        which = "no live instance" if pid is None else f"--instance {pid}: no live instance"
        raise InstanceError(f"{which}; start one with `vllm-omni serve MODEL --omni --scheduler X`")
    raise InstanceError(
        f"several live instances; name one with --instance: {[i.pid for i in instances]}"
    )


def request(
    instance: Instance,
    settings: Settings | Callable[[Settings], Settings],
    wait_s: float = 2.0,
) -> bool:
    """Ask an instance to run under these settings from its next step on.

    Args:
        instance: the one to ask.
        settings: the new settings, or what makes them of those that were last asked for; no other
            writer comes in between.
        wait_s: how long to wait for the scheduler to confirm.

    Returns:
        Whether it confirmed. An idle scheduler takes no steps: it confirms with its next request,
        and applies the settings before it schedules that.

    Raises:
        InstanceError: the instance is gone or refused the settings.
    """
    try:
        file = open(instance.path, "r+b")  # noqa: SIM115 (closed below, with the map)
    except OSError as error:
        raise InstanceError(f"instance {instance.pid}: gone ({error})") from error
    with file, mmap.mmap(file.fileno(), SIZE) as shared:
        fcntl.flock(file, fcntl.LOCK_EX)  # among writers; the scheduler takes no lock
        if callable(settings):
            settings = settings(_get_request(shared) or instance.settings)
        (sequence,) = _SEQUENCE.unpack_from(shared, _REQUEST_AT)
        sequence = (sequence | 1) + 1  # even, and above one that a dead writer left odd
        _put_request(shared, settings, sequence)
        fcntl.flock(file, fcntl.LOCK_UN)
        deadline_s = time.monotonic() + wait_s
        while True:
            applied, refused = _APPLIED.unpack_from(shared, _APPLIED_AT)
            if applied >= sequence:
                if applied == sequence and refused:
                    raise InstanceError(f"instance {instance.pid}: refused the settings")
                return True
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(0.01)
