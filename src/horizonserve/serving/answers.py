"""First responses of requests that later stages answer, told by the front end to the shared stage.

The shared stage sees a long request leave; when its user heard the first sound, or had the image,
only the front end knows. It says so in a datagram to an abstract Unix socket, which is no file and
goes with its process. Only processes of the same user are believed. What is lost, because nobody
listens or the queue is full, is a sample less for an estimate and nothing else.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from vllm.logger import init_logger

from horizonserve.policy.slack import Ticket

logger = init_logger(f"vllm.{__name__}")

#: Names the socket of the server whose processes inherit it.
VARIABLE: Final = "HORIZONSERVE_ANSWERS"
Learn = Callable[["Awaited", float], None]

_TIME: Final = struct.Struct("=d")
_CREDENTIALS: Final = struct.Struct("=3i")
_LONGEST_ID_BYTES: Final = 1_024
#: Requests whose first response is expected at most; the oldest are forgotten.
_EXPECTED: Final = 4_096


def prepare() -> None:
    """Choose the name, in the process that launches the stages."""
    os.environ[VARIABLE] = f"horizonserve-answers-{os.getpid()}-{secrets.token_hex(8)}"


def tell(request_id: str, at_s: float) -> None:
    """Say when a first response left; never waits, never raises."""
    name = os.environ.get(VARIABLE)
    if name is None:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            out.sendto(_TIME.pack(at_s) + request_id.encode(), f"\0{name}")
    except OSError:
        pass


@dataclass(slots=True)
class Awaited:
    """A request whose first response is made downstream; the request itself, with its media, is
    let go when it leaves the stage."""

    ticket: Ticket
    prompt_tokens: int
    #: Those that it had when it left the stage; 0 where the response came before.
    answer_tokens: int = 0


class Answers:
    """Matches first responses with the requests that came to the shared stage."""

    def __init__(self, learn: Learn) -> None:
        """``learn`` is told of each request whose first response has left, and when that was."""
        self._learn = learn
        self._expected: dict[str, Awaited] = {}
        self._socket: socket.socket | None = None
        if (name := os.environ.get(VARIABLE)) is None:
            return
        inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            inbox.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            inbox.bind(f"\0{name}")
        except OSError as error:
            # Another replica of the stage has it.
            inbox.close()
            logger.warning("HorizonServe: no word of first responses downstream (%s)", error)
            return
        self._socket = inbox

    def expect(self, request: Any) -> None:
        """A request has come that a later stage will answer."""
        if self._socket is None:
            return
        if len(self._expected) >= _EXPECTED:
            del self._expected[next(iter(self._expected))]
        self._expected[_name(request)] = Awaited(
            request.horizonserve_ticket, request.num_prompt_tokens
        )

    def left(self, request: Any) -> None:
        """It has all its tokens, and goes on to the next stage."""
        if (awaited := self._expected.get(_name(request))) is not None:
            awaited.answer_tokens = request.num_output_tokens

    def forget(self, request: Any) -> None:
        """It will not be answered."""
        self._expected.pop(_name(request), None)

    def poll(self) -> None:
        """Learn from all that was told."""
        while self._socket is not None:
            try:
                told, extra, _, _ = self._socket.recvmsg(
                    _TIME.size + _LONGEST_ID_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except OSError:
                return
            if len(told) > _TIME.size and _is_ours(extra):
                (at_s,) = _TIME.unpack_from(told)
                awaited = self._expected.pop(told[_TIME.size :].decode(errors="replace"), None)
                if awaited is not None:
                    self._learn(awaited, at_s)

    def close(self) -> None:
        """No more is heard."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _name(request: Any) -> str:
    """What the front end calls a request."""
    return getattr(request, "external_req_id", None) or str(request.request_id)


def _is_ours(extra: list[tuple[int, int, bytes]]) -> bool:
    """Whether the kernel says that a process of this user sent it."""
    for level, kind, data in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            _, user, _ = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])
            return bool(user == os.geteuid())
    return False
