"""Token ids under lending against those of the stock scheduler, on vLLM's own engine and runner.

    nice python scripts/token_equality.py --requests 1000

Makes a tiny random Llama with three LoRA adapters, of which a step holds two, and serves the same
greedy requests several times in a process each: with vLLM's scheduler, and under `horizon` and
`halo` with half and nine tenths of the running requests leased at random in every step and with the
planned leases. Every third request has penalties, prompts are computed in chunks, KV blocks are too
few for the slots, and every tenth request is aborted in its middle. Needs the CPU build of vLLM.
Prints one line per run and fails on any difference.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# In one process and on whatever core is free; read when vLLM is imported.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "serving"))

RUNS = ("stock", "half", "most", "planned", "halo-half", "halo-most", "halo")
SHARES = {"half": 0.5, "most": 0.9}
ADAPTERS = 3
HIDDEN, HEAD, LAYERS, VOCABULARY, RANK = 128, 64, 2, 512, 8
#: Requests in the engine at a time, running and waiting.
OFFERED = 40


def make_model(path: Path) -> None:
    """Write a random Llama, and adapters in ``path/1``, ``path/2``, ..."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from horizonserve.models.llama_lora import write_adapter

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_attention_heads=HIDDEN // HEAD,
        num_key_value_heads=1,
        head_dim=HEAD,
        num_hidden_layers=LAYERS,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        initializer_range=0.3,  # else the logits are so near to each other that rounding decides
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(path)
    for adapter in range(1, ADAPTERS + 1):
        write_adapter(config, torch.float32, path / str(adapter))


def scheduler_class(run: str) -> type:
    """The scheduler of this run; counts preemptions."""
    from random_lending import RandomHalo, RandomLending
    from vllm.v1.core.sched.scheduler import Scheduler

    from horizonserve.serving import lender
    from horizonserve.serving.plain import HorizonScheduler

    class Counted(Scheduler):
        preemptions = 0

        def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
            self.preemptions += 1
            super()._preempt_request(*args, **kwargs)

    class Planned(HorizonScheduler, Counted):
        pass

    class Random(Planned):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            share = SHARES[run.removeprefix("halo-")]
            if self._halo is not None:
                self._halo = RandomHalo(run, share, self._halo.limits)
            else:
                self._lending = RandomLending(run, share)
            # More may enter than KV blocks last for, so that leases and preemptions meet.
            lender.with_blocks = lambda shown, *_: shown

    return Counted if run == "stock" else Planned if run in ("planned", "halo") else Random


def serve(run: str, model: Path, count: int, seed: int) -> dict[str, Any]:
    """Serve the requests once; returns the tokens per request and what happened on the way."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    settings: dict[str, Any] = {"scheduler": "horizon", "batch": 6}
    if run.startswith("halo"):
        # Few places, so that the planned leases are many; the random ones are many in any case.
        settings = {"scheduler": "halo"} | ({"token_budget": 12} if run == "halo" else {})
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        block_size=32,
        num_gpu_blocks_override=24,
        enable_lora=True,
        max_loras=2,
        max_cpu_loras=ADAPTERS,
        max_lora_rank=RANK,
        enforce_eager=True,
        scheduler_cls=scheduler_class(run),
        additional_config={"horizon": settings},
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    chance = random.Random(seed)
    tokens: dict[str, list[int]] = {}
    abort_at: dict[str, int] = {}
    started_s = time.monotonic()
    while len(tokens) < count or engine.has_unfinished_requests():
        while len(tokens) < count and engine.get_num_unfinished_requests() < OFFERED:
            name = str(len(tokens))
            tokens[name] = []
            prompt = [chance.randrange(3, VOCABULARY) for _ in range(chance.randint(5, 120))]
            wanted = chance.randint(3, 30)
            # Every request has one: beside requests with adapters, vLLM's CPU kernels apply an
            # adapter also to those without (vllm#48421).
            adapter = chance.randint(1, ADAPTERS)
            penalties = {"presence_penalty": 0.5, "repetition_penalty": 1.2}
            if len(tokens) % 10 == 0:
                abort_at[name] = chance.randrange(wanted)
            engine.add_request(
                name,
                {"prompt_token_ids": prompt},
                SamplingParams(
                    temperature=0,
                    max_tokens=wanted,
                    ignore_eos=True,
                    detokenize=False,
                    **(penalties if len(tokens) % 3 == 0 else {}),
                ),
                lora_request=LoRARequest(f"adapter {adapter}", adapter, str(model / str(adapter))),
            )
        for output in engine.step():
            found = tokens[output.request_id] = list(output.outputs[0].token_ids)
            if len(found) > abort_at.get(output.request_id, len(found)):
                engine.abort_request([output.request_id])
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return {
        "tokens": tokens,
        "aborted": list(abort_at),
        "took_s": time.monotonic() - started_s,
        "steps": scheduler.current_step,
        "leases": getattr(scheduler, "_lent", 0),
        "preemptions": scheduler.preemptions,
        "blocks_kept": len(scheduler.kv_cache_manager.block_pool.blocks) - 1 - free,
    }


def differing(found: dict[str, Any], stock: dict[str, Any]) -> list[str]:
    """Requests whose tokens are not those of the stock scheduler, or of an abort not a prefix."""
    aborted = set(stock["aborted"])
    names = []
    for name, expected in stock["tokens"].items():
        tokens = found["tokens"][name]
        end = min(len(tokens), len(expected)) if name in aborted else None
        if tokens[:end] != expected[:end]:
            names.append(name)
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="show what the engine says")
    parser.add_argument("--runs", nargs="+", default=RUNS[1:], choices=RUNS[1:])
    parser.add_argument("--run", choices=RUNS, help="only this run, its result to --out")
    parser.add_argument("--model", type=Path, help="of --run")
    parser.add_argument("--out", type=Path, help="of --run")
    args = parser.parse_args()
    if args.run:
        args.out.write_text(json.dumps(serve(args.run, args.model, args.requests, args.seed)))
        return 0
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model)
        stock: dict[str, Any] = {}
        for run in (RUNS[0], *args.runs):
            out = Path(folder) / f"{run}.json"
            command = [sys.executable, __file__, "--run", run, "--model", str(model)]
            command += ["--out", str(out), "--seed", str(args.seed)]
            command += ["--requests", str(args.requests)]
            subprocess.run(command, check=True, stderr=None if args.verbose else subprocess.DEVNULL)
            result = json.loads(out.read_text())
            stock = stock or result
            names = differing(result, stock)
            wrong += len(names) + result["blocks_kept"]
            generated = sum(map(len, result["tokens"].values()))
            print(
                f"{run}: {len(result['tokens'])} requests, {generated} tokens,"
                f" {result['steps']} steps, {result['leases']} leases,"
                f" {result['preemptions']} preemptions, {result['took_s']:.0f} s;"
                f" {len(names)} requests differ, {result['blocks_kept']} KV blocks kept"
                + (f": {' '.join(names[:10])}" if names else ""),
                flush=True,
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
