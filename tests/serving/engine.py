"""The real scheduler classes without an engine: a tiny model configuration and a fake worker."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import vllm_omni  # noqa: F401 (patches vLLM's Request, as in a real stage process)
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager
from vllm_omni.request import OmniRequest

BLOCK_TOKENS = 16


@cache
def model_dir() -> str:
    """A model directory with a configuration and nothing else; left to the system's clean-up."""
    path = Path(tempfile.mkdtemp(prefix="horizonserve-test-"))
    (path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_attention_heads": 1,
                "num_key_value_heads": 1,
                "num_hidden_layers": 1,
                "vocab_size": 128,
                "max_position_embeddings": 16384,
            }
        )
    )
    return str(path)


def make_scheduler(
    cls: type,
    *,
    slots: int = 4,
    token_budget: int = 512,
    blocks: int = 2000,
    loras: int = 0,
    additional_config: dict[str, Any] | None = None,
    prefix_caching: bool = False,
) -> Any:
    """A scheduler of this class with its KV cache manager; ``asynchronous`` by its name.

    ``loras``: most adapters in a step (``max_loras``); 0: LoRA is off.
    """
    init_none_hash(sha256)
    model = ModelConfig(model=model_dir(), tokenizer=model_dir(), skip_tokenizer_init=True)
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_num_seqs=slots,
            max_num_batched_tokens=token_budget,
            max_model_len=8192,
            is_encoder_decoder=False,
            async_scheduling="Async" in cls.__name__,
        ),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=prefix_caching),
        device_config=DeviceConfig(device="cpu"),
        lora_config=LoRAConfig(max_loras=loras) if loras else None,
        additional_config=additional_config or {},
    )
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        log_stats=True,
    )


def stop_clock(scheduler: Any) -> None:
    """Let a scheduler's time stand still unless somebody moves ``scheduler.now_s[0]``."""
    scheduler.now_s = [1000.0]
    scheduler._clock = lambda: scheduler.now_s[0]


def make_request(
    name: str,
    *,
    prompt_tokens: int | list[int] = 8,
    output_tokens: int = 4,
    final_stage: int | None = None,
    companion: bool = False,
    **fields: Any,
) -> Any:
    """A request; a name that starts with "l" is long (final stage 2), any other is short."""
    stage = (2 if name[0] == "l" else 0) if final_stage is None else final_stage
    info: dict[str, Any] = {"omni_final_stage_id": stage}
    if companion:
        info["omni_force_kv_transfer"] = True
    arguments = fields.pop("extra_args", None)
    # Wall time that no clock ever showed: the deadline then counts from the scheduler's own.
    fields.setdefault("arrival_time", 0.0)
    return OmniRequest(
        request_id=name,
        prompt_token_ids=[5] * prompt_tokens if isinstance(prompt_tokens, int) else prompt_tokens,
        sampling_params=SamplingParams(
            max_tokens=output_tokens, ignore_eos=True, extra_args=arguments
        ),
        pooling_params=None,
        additional_information=info,
        block_hasher=fields.pop("block_hasher", None),
        **fields,
    )


def model_output(scheduler: Any, output: Any) -> ModelRunnerOutput:
    """Of a step that was just scheduled: a token of every request whose prompt ends with it."""
    names = list(output.num_scheduled_tokens)
    sampled = [[] if scheduler.requests[name].is_prefill_chunk else [7] for name in names]
    return ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)


def answer(scheduler: Any, output: Any) -> list[str]:
    """Give every request whose prompt is computed one token; returns those that finished."""
    names = list(output.num_scheduled_tokens)
    tokens = []
    for name in names:
        request = scheduler.requests[name]
        computed = request.num_computed_tokens >= request.num_prompt_tokens
        tokens.append([7] if computed else [])
    result = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=tokens,
    )
    outputs = scheduler.update_from_output(output, result)
    return [o.request_id for per in outputs.values() for o in per.outputs if o.finish_reason]


def step(scheduler: Any) -> list[str]:
    """One synchronous step; returns the requests that it scheduled for the first time."""
    output = scheduler.schedule()
    new = [request.req_id for request in output.scheduled_new_reqs]
    answer(scheduler, output)
    return new


def drain(scheduler: Any, steps: int = 5000) -> int:
    """Step until nothing is left; returns how many steps it took."""
    for taken in range(steps):
        if not scheduler.has_unfinished_requests():
            return taken
        step(scheduler)
    raise AssertionError(f"{scheduler.get_num_unfinished_requests()} requests left")


def free_blocks(scheduler: Any) -> int:
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def queued(scheduler: Any) -> list[str]:
    queues: Iterable[Any] = (scheduler.waiting, scheduler.skipped_waiting)
    return [request.request_id for queue in queues for request in queue]
