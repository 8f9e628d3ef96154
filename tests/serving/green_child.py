"""One stage process on the fake driver: gets its loop from the hooks, and steps on order."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from horizonserve.serving import hooks
from horizonserve.spatial import monitor as module
from horizonserve.spatial import torch_streams

index, directory = int(sys.argv[1]), Path(sys.argv[2])
module.DIRECTORY = directory
current = [0]


class Streams:
    """In torch's place, which would want a real GPU."""

    def __init__(self, device_index: int) -> None: ...

    def wrap(self, pointer: int) -> int:
        return pointer

    @contextmanager
    def use(self, stream: int) -> Iterator[int]:
        surrounding, current[0] = current[0], stream
        yield surrounding
        current[0] = surrounding


torch_streams.TorchStreams = Streams  # type: ignore[assignment, misc]
streams: list[int] = []


class Worker:
    device = SimpleNamespace(type="cuda", index=0)
    vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode="FULL"),
        model_config=SimpleNamespace(stage_id=index, enforce_eager="graphs" not in sys.argv),
        parallel_config=SimpleNamespace(
            world_size=1, data_parallel_size=1, distributed_executor_backend="uni"
        ),
    )
    model_runner = SimpleNamespace(profile_run=lambda: streams.append(current[0]))

    def execute_model(self, _: Any) -> None:
        streams.append(current[0])

    def sample_tokens(self, _: Any) -> None:
        streams.append(current[0])

    def shutdown(self) -> None: ...


worker: Any = Worker()
hooks._attach_llm(worker)
worker.model_runner.profile_run()
profiled = len(set(streams)), 0 in streams
for order in sys.stdin:
    streams.clear()
    if order.strip() == "step":
        worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=1))
        worker.sample_tokens(None)
    monitor = module.Monitor.attach()
    reading, veto = monitor.read(index), monitor.vetoed()
    monitor.close()
    said = {
        "described": hooks.described,
        "profiled": profiled,
        "levels": reading and [list(level) for level in reading.levels],
        "applied": reading and reading.state.applied,
        "capped": [stream != 0 for stream in streams],
        "veto": veto,
    }
    print(json.dumps(said), flush=True)
worker.shutdown()
