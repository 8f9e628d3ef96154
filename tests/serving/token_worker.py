"""A worker whose tokens depend on the whole KV cache of a request, and the engine's two loops."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from engine import BLOCK_TOKENS
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

VOCABULARY = 30_000
_POSITIONS = np.arange(1, 4096, dtype=np.uint64)
#: How much each position counts in a sampled token.
_WEIGHTS = _POSITIONS * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)


@dataclass
class State:
    """What the worker knows of a request; a token that it was never told is None."""

    tokens: list[int | None]
    prompt_tokens: int
    blocks: list[int]
    adapter: int


class Worker:
    """Executes what a scheduler sends, and knows no more than that.

    - The KV of a position depends on its token, its adapter and the KV of the position before; a
      sampled token depends on the KV of all positions. Both are read through the block table. So
      tokens change when a block is lost, freed too early or written by another request.
    - Before every step all free blocks are overwritten.
    - Tokens come from where the real runners have them: the V1 runner is sent the tokens of a
      request that sat out, and under asynchronous scheduling knows only what the step before
      sampled; the V2 runner keeps the tokens of a request until it ends or is preempted.
    """

    def __init__(self, scheduler: Any, *, asynchronous: bool) -> None:
        self.pool = scheduler.kv_cache_manager.block_pool
        self.slots = scheduler.max_num_running_reqs
        self.adapters = scheduler.lora_config.max_loras
        self.v2 = scheduler.use_v2_model_runner
        self.asynchronous = asynchronous
        self.kv = np.zeros((len(self.pool.blocks), BLOCK_TOKENS), np.uint64)
        self.states: dict[str, State] = {}
        #: Of the step before: what it sampled, and who took part.
        self.sampled: dict[str, int] = {}
        self.batch: set[str] = set()
        self.steps = 0

    def execute(self, output: Any) -> ModelRunnerOutput:
        """Run one step."""
        self.steps += 1
        free = [block.block_id for block in self.pool.blocks if block.ref_cnt == 0]
        self.kv[free] = self.steps
        computed = self._update(output)
        before, self.sampled = self.sampled, {}
        tokens = []
        for name, count in output.num_scheduled_tokens.items():
            tokens.append(self._compute(name, computed[name], count, before))
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=tokens,
        )

    def _update(self, output: Any) -> dict[str, int]:
        """Take over what is new; returns the computed tokens of those that take part."""
        for name in output.finished_req_ids:
            self.states.pop(name, None)
        if self.v2:
            for name in output.preempted_req_ids or ():
                self.states.pop(name, None)
        computed = {}
        for new in output.scheduled_new_reqs:
            known = new.prefill_token_ids if self.v2 else new.prompt_token_ids
            self.states[new.req_id] = State(
                [*known],
                len(new.prompt_token_ids),
                list(new.block_ids[0]),
                new.lora_request.lora_int_id if new.lora_request else 0,
            )
            computed[new.req_id] = new.num_computed_tokens
        if self.v2:
            assert len(self.states) <= self.slots
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            state = self.states[name]
            new_blocks = cached.new_block_ids[i]
            if name in cached.resumed_req_ids:
                state.blocks = []
            if new_blocks is not None:
                state.blocks += new_blocks[0]
            outputs = cached.num_output_tokens[i]
            if not self.v2 and self.asynchronous and outputs and name not in self.batch:
                told = cached.all_token_ids[name]
                state.tokens[state.prompt_tokens :] = told[-outputs:]
            elif not self.v2:
                del state.tokens[state.prompt_tokens + outputs :]
            computed[name] = cached.num_computed_tokens[i]
        self.batch = set(output.num_scheduled_tokens)
        adapters = {self.states[name].adapter for name in output.num_scheduled_tokens} - {0}
        assert len(adapters) <= self.adapters
        return computed

    def _compute(self, name: str, start: int, count: int, before: dict[str, int]) -> list[int]:
        """Compute positions; samples a token if they reach the end of what is known."""
        state = self.states[name]
        end = start + count
        tokens = [
            before[name] if token is None and start + i == len(state.tokens) - 1 else token
            for i, token in enumerate(state.tokens[start:end])
        ]
        assert len(tokens) == count and None not in tokens, f"{name}: unknown tokens"
        slots = np.array(state.blocks, dtype=np.int64)[np.arange(end) // BLOCK_TOKENS]
        offsets = np.arange(end) % BLOCK_TOKENS
        values = np.array(tokens, dtype=np.uint64) + np.uint64(1 + 100_003 * state.adapter)
        values *= _WEIGHTS[start:end]
        if start:
            values[:1] += self.kv[slots[start - 1], offsets[start - 1]]
        self.kv[slots[start:], offsets[start:]] = np.cumsum(values)
        if end < len(state.tokens):
            return []
        read = self.kv[slots, offsets] * _WEIGHTS[:end]
        token = int(read.sum() >> np.uint64(17)) % VOCABULARY
        self.sampled[name] = token
        state.tokens.append(None if self.asynchronous and not self.v2 else token)
        return [token]


def serve(
    scheduler: Any,
    worker: Worker,
    arrivals: dict[int, list[Any]],
    aborts: dict[int, list[str]],
    *,
    steps: int = 20_000,
) -> dict[str, list[int]]:
    """Run the engine's loop until nothing is left: two steps under way if asynchronous.

    ``arrivals`` and ``aborts`` are by the number of the step. Aborts come while the step runs.

    Returns:
        The tokens that left the engine, per request.
    """
    depth = 2 if worker.asynchronous else 1
    tokens: dict[str, list[int]] = {}
    under_way: deque[tuple[Any, ModelRunnerOutput]] = deque()
    last = max(arrivals)
    for number in range(steps):
        for request in arrivals.get(number, ()):
            tokens[request.request_id] = []
            scheduler.add_request(request)
        if scheduler.has_requests():
            output = scheduler.schedule()
            under_way.append((output, worker.execute(output)))
            scheduler.now_s[0] += 0.01 + 0.0002 * output.total_num_scheduled_tokens
            if len(under_way) < depth and scheduler.has_requests():
                scheduler.finish_requests(aborts.get(number, ()), RequestStatus.FINISHED_ABORTED)
                continue
        scheduler.finish_requests(aborts.get(number, ()), RequestStatus.FINISHED_ABORTED)
        if under_way:
            for per in scheduler.update_from_output(*under_way.popleft()).values():
                for out in per.outputs:
                    tokens[out.request_id] += out.new_token_ids
        elif number > last:
            return tokens
    raise AssertionError(f"{scheduler.get_num_unfinished_requests()} requests left")
