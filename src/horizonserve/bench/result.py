"""What happened to one request, as plain data that goes into a file line by line."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from horizonserve.slo import RequestClass


class Status(StrEnum):
    """How a request ended."""

    OK = "ok"
    #: An error of the server, a broken stream, or no connection.
    FAILED = "failed"
    #: No end within the limit of a single request.
    TIMEOUT = "timeout"
    #: Still open when the run was cut off.
    CUT = "cut"


@dataclass(frozen=True, slots=True)
class Result:
    """One request. Times count from its scheduled arrival, so waiting in the client is included."""

    #: Position in the trace: the same request in every run of the trace.
    index: int
    request_class: RequestClass
    #: Scheduled arrival, from the start of the run.
    at_s: float
    status: Status
    #: First response: first content token (text), first audio chunk, or finished image.
    first_s: float | None
    #: Until it ended in whichever way.
    end_s: float
    #: Answer tokens of the shared stage, as the server counts them, else the text chunks.
    tokens: int = 0
    #: Prompt tokens of the shared stage, media included; 0 where the server did not say.
    prompt_tokens: int = 0
    #: Time per output token after the first; only text has one that a user sees.
    tpot_s: float | None = None
    #: How much later than scheduled the client sent it.
    late_s: float = 0.0
    error: str = ""
    #: When each token of a text answer arrived; tokens that came together have the same time.
    token_s: tuple[float, ...] = ()

    def not_cut(self) -> Result:
        """Itself, for a caller that a cancellation must end: the client takes one as a hang-up.

        Raises:
            asyncio.CancelledError: it was cut off.
        """
        if self.status is Status.CUT:
            raise asyncio.CancelledError
        return self

    def to_json(self) -> dict[str, Any]:
        """Plain data, times rounded to 10 us, those of the tokens to 1 ms."""
        plain = {
            name: round(value, 5) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }
        return {**plain, "token_s": [round(at_s, 3) for at_s in self.token_s]}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Result:
        """The result of ``to_json``."""
        typed = {
            "request_class": RequestClass(plain["request_class"]),
            "status": Status(plain["status"]),
            "token_s": tuple(plain.get("token_s", ())),
        }
        return cls(**{**plain, **typed})
