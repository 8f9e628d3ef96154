"""What each step of the shared stage did, as lines of JSON for pictures and for doubts."""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from collections import deque
from math import isfinite
from pathlib import Path as FilePath
from typing import Any, Final, TextIO

from horizonserve.policy.lending import Job, Plan
from horizonserve.policy.slack import Ticket
from horizonserve.slo import Path

logger = logging.getLogger(f"vllm.{__name__}")

PERIOD_S: Final = 1.0
#: Entries that may wait for the disk; further ones are dropped.
MAX_WAITING: Final = 20_000
#: A server that ends does not wait longer for a disk that hangs.
_CLOSE_S: Final = 5.0


class StepLog:
    """Appends entries to a file, from a thread of its own; the caller never waits for the disk.

    The file is written anew, and its name gets the process id before the ending: ``steps.jsonl``
    is ``steps-4711.jsonl``. If it cannot be written there is one warning and no more log.
    """

    def __init__(self, path: str) -> None:
        file = FilePath(path)
        self.path = file.with_stem(f"{file.stem}-{os.getpid()}")
        #: Entries that the file lacks because the disk was too slow.
        self.dropped = 0
        self._waiting: deque[dict[str, Any]] = deque()
        self._writes = True
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="step-log", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # for owners that end without saying so

    def add(self, entry: dict[str, Any]) -> None:
        """Have this written within about a second."""
        if not self._writes:
            return
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(entry)
        else:
            self.dropped += 1

    def close(self) -> None:
        """Write what waits and end; safe to call again."""
        atexit.unregister(self.close)
        self._end.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            with self.path.open("w", encoding="utf-8") as file:
                while not self._end.wait(PERIOD_S):
                    self._write(file)
                self._writes = False
                self._write(file)
        except (OSError, ValueError) as error:
            logger.warning(
                "HorizonServe: the step log %s cannot be written (%s); it ends here, the server"
                " goes on",
                self.path,
                error,
            )
        finally:
            self._writes = False
            self._waiting.clear()
        if self.dropped:
            logger.warning("HorizonServe: the step log %s lacks %s steps", self.path, self.dropped)

    def _write(self, file: TextIO) -> None:
        # The deque is shared without a lock: both its ends are atomic.
        for _ in range(len(self._waiting)):
            file.write(json.dumps(self._waiting.popleft()) + "\n")
        file.flush()


def entry(plan: Plan, now_s: float) -> dict[str, Any]:
    """What a plan does, for the log.

    ``time_s`` is ``now_s``, on the scheduler's clock. Each of ``requests`` runs or enters: ``id``,
    ``path``, ``state`` (ran, lent or entered), ``tokens`` that it has to compute before its next
    one (the step may cut a prompt), ``slack_ms`` to the time that its promise names for the next
    token or the first response (None: no promise), ``broken``, and ``first_token``, whether it has
    been generated. A request that entered and is not in a later entry was refused by the stage.
    """
    states = (("ran", plan.run), ("lent", plan.lend), ("entered", plan.enter))
    return {
        "time_s": round(now_s, 6),
        "limit_ms": round(plan.limit_s * 1e3, 3),
        "given_up": plan.given_up,
        "requests": [_request(job, state, now_s) for state, jobs in states for job in jobs],
    }


def answer(ticket: Ticket, actual_s: float) -> dict[str, Any]:
    """A first response, for the log: how long it was expected to take, from the first step on, when
    the request came, and how long it took."""
    return {
        "class": ticket.request_class.value,
        "estimate_s": round(ticket.estimate_s, 6),
        "actual_s": round(actual_s, 6),
    }


def _request(job: Job, state: str, now_s: float) -> dict[str, Any]:
    ticket = job.ticket
    short = ticket.path is Path.SHORT
    slack_s = (ticket.due_s(job.in_flight) if short else ticket.deadline_s) - now_s
    return {
        "id": job.request.request_id,
        "path": ticket.path.value,
        "state": state,
        "tokens": job.tokens,
        "slack_ms": round(slack_s * 1e3, 3) if isfinite(slack_s) else None,
        "broken": ticket.broken,
        "first_token": job.generated > job.in_flight,
    }
