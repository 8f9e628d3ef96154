"""vLLM's graphs, one set per level: real runner, wrappers and dispatcher; only the GPU is played.

What is played are torch's graphs and streams and the accelerator's memory. The model is a full
wrapper around two pieces with a step between them that no piece captures, as vLLM builds it, and a
wrapped ``talker_mtp`` beside it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

import torch  # noqa: E402 (only where vLLM-Omni is installed)
from engine import model_dir  # noqa: E402
from vllm.compilation import monitor  # noqa: E402
from vllm.compilation.cuda_graph import CUDAGraphWrapper  # noqa: E402
from vllm.config import (  # noqa: E402
    CompilationMode,
    CUDAGraphMode,
    DeviceConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import parallel_state  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.utils import torch_utils  # noqa: E402
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher  # noqa: E402
from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager  # noqa: E402
from vllm_omni.config.model import OmniModelConfig  # noqa: E402
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner  # noqa: E402

from horizonserve.serving.graphs import GraphSets, live_graphs, refusal  # noqa: E402
from horizonserve.spatial.ladder import Level  # noqa: E402

pytestmark = pytest.mark.vllm

LEVELS = (Level(32, 100), Level(64, 68), Level(132, 0))
WHOLE = LEVELS[-1]
SIZES = [1, 2, 4]
MODES = [
    CUDAGraphMode.PIECEWISE,
    CUDAGraphMode.FULL,
    CUDAGraphMode.FULL_DECODE_ONLY,
    CUDAGraphMode.FULL_AND_PIECEWISE,
]
GRAPH_BYTES = 3


class Stream:
    def wait_stream(self, other: Stream) -> None:
        pass


class Gpu:
    """Streams and graphs that say what happened to them; ``current`` is the stream in use."""

    def __init__(self) -> None:
        self.default = self.current = Stream()
        self.captured: list[Any] = []
        self.replayed: list[Any] = []
        #: How many captures there may be before the memory is used up.
        self.room = 10_000

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current
        torch.cuda.set_stream(stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(before)

    @contextlib.contextmanager
    def graph(self, graph: Any, pool: object, stream: Stream) -> Iterator[None]:
        if len(self.captured) >= self.room:
            raise torch.OutOfMemoryError("the device is full")
        with self.stream(stream):
            yield
        graph.stream, graph.pool = stream, pool
        self.captured.append(graph)

    def memory(self) -> tuple[int, int]:
        return 10**6 - GRAPH_BYTES * len(self.captured), 10**6


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()

    class CUDAGraph:
        def replay(self) -> None:
            gpu.replayed.append(self)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    monkeypatch.setattr(torch.cuda, "graph", gpu.graph)
    monkeypatch.setattr(torch.cuda, "stream", gpu.stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: gpu.current)
    # vLLM's keeps its own note of the stream; its CPU worker, once imported, has another instead.
    monkeypatch.setattr(torch.cuda, "set_stream", torch_utils._patched_set_stream)
    monkeypatch.setattr(torch_utils, "prev_set_stream", gpu.set_stream)
    monkeypatch.setattr(torch_utils, "_current_stream_tls", threading.local())
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", gpu.memory)
    monkeypatch.setattr(type(current_platform), "_global_graph_pool", object())
    monkeypatch.setattr(monitor, "cudagraph_capturing_enabled", False)
    return gpu


class Ladder:
    """A backend whose levels have a stream each, the whole none, as with green contexts."""

    def __init__(self, gpu: Gpu) -> None:
        self.levels = LEVELS
        self.streams = {level: Stream() for level in LEVELS if not level.whole}
        self._gpu = gpu

    def activate(self, level: Level) -> contextlib.AbstractContextManager[None]:
        stream = self.streams.get(level)
        return contextlib.nullcontext() if stream is None else self._gpu.stream(stream)


def make_config(mode: CUDAGraphMode, **model: Any) -> VllmConfig:
    """A stage's configuration on a GPU; the platform of this machine turns graphs off."""
    config = VllmConfig(
        model_config=OmniModelConfig(
            model=model_dir(), tokenizer=model_dir(), skip_tokenizer_init=True, **model
        ),
        device_config=DeviceConfig(device="cpu"),
    )
    compilation = config.compilation_config
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.splitting_ops = None
    compilation.set_splitting_ops_for_v1(all2all_backend="")
    compilation.cudagraph_mode = mode
    compilation.cudagraph_capture_sizes = SIZES
    compilation.max_cudagraph_capture_size = SIZES[-1]
    compilation.cudagraph_num_of_warmups = 1
    return config


class Runner(GPUARModelRunner):
    """The real runner's capture, on a model that only says what it did."""

    # Two collections of the whole test process per capture would take most of a test's time.
    _freeze_gc = staticmethod(contextlib.nullcontext)

    def __init__(self, config: VllmConfig) -> None:
        self.vllm_config = config
        self.compilation_config = config.compilation_config
        self.parallel_config = config.parallel_config
        self.load_config = config.load_config
        self.load_config.use_tqdm_on_load = False
        self.lora_config = self.encoder_cudagraph_manager = None
        self.device = torch.device("cpu")
        self.cudagraph_dispatcher = CudagraphDispatcher(config)
        self.cudagraph_dispatcher.initialize_cudagraph_keys(self.compilation_config.cudagraph_mode)
        #: Calls that no graph replayed.
        self.calls: list[str] = []
        self.wrappers: list[CUDAGraphWrapper] = []
        first, last = (self._wrapped(name, CUDAGraphMode.PIECEWISE) for name in ("first", "last"))

        def forward() -> tuple[str, ...]:
            return (*first(), *self._call("between"), *last())

        self.model = self._wrapped(forward, CUDAGraphMode.FULL)
        self.has_talker_mtp = self.compilation_config.cudagraph_mode.has_full_cudagraphs()
        if self.has_talker_mtp:
            self.talker_mtp = self._wrapped("mtp", CUDAGraphMode.FULL)
        rows = SimpleNamespace(gpu=torch.zeros(SIZES[-1]))
        self.talker_mtp_input_ids = self.talker_mtp_inputs_embeds = rows
        self.last_talker_hidden = self.text_step = rows

    def _wrapped(self, what: Any, mode: CUDAGraphMode) -> CUDAGraphWrapper:
        run = what if callable(what) else lambda *_: self._call(what)
        self.wrappers.append(CUDAGraphWrapper(run, self.vllm_config, mode))
        return self.wrappers[-1]

    def _call(self, name: str) -> tuple[str]:
        self.calls.append(name)
        return (name,)

    def _dummy_run(
        self,
        num_tokens: int,
        cudagraph_runtime_mode: CUDAGraphMode,
        uniform_decode: bool,
        **_: Any,
    ) -> None:
        mode, descriptor = self.cudagraph_dispatcher.dispatch(
            num_tokens, uniform_decode, valid_modes={cudagraph_runtime_mode}
        )
        assert mode is cudagraph_runtime_mode
        with set_forward_context(
            None, self.vllm_config, cudagraph_runtime_mode=mode, batch_descriptor=descriptor
        ):
            self.model()

    def _determine_batch_execution_and_padding(self, num_tokens: int, **_: Any) -> tuple[Any, ...]:
        mode, descriptor = self.cudagraph_dispatcher.dispatch(num_tokens, uniform_decode=True)
        return mode, descriptor, None, None, None

    def forward(self, tokens: int, decode: bool) -> Any:
        """A step as it is served: dispatched by its size."""
        mode, descriptor = self.cudagraph_dispatcher.dispatch(tokens, decode)
        with set_forward_context(
            None, self.vllm_config, cudagraph_runtime_mode=mode, batch_descriptor=descriptor
        ):
            output = self.model()
            if decode and self.has_talker_mtp:
                output += self.talker_mtp()
        return output


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What vLLM's capture finds in a worker: the groups of one process, and its workspaces."""
    store = tmp_path_factory.mktemp("groups") / "store"
    with set_current_vllm_config(make_config(CUDAGraphMode.NONE)):
        parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
        init_workspace_manager(torch.device("cpu"), 1)
        yield
        reset_workspace_manager()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@pytest.fixture(params=MODES, ids=str)
def runner(request: pytest.FixtureRequest, gpu: Gpu, groups: None) -> Runner:
    return Runner(make_config(request.param))


@pytest.fixture
def full(gpu: Gpu, groups: None) -> Runner:
    return Runner(make_config(CUDAGraphMode.FULL))


def graphs_of(runner: Runner) -> dict[tuple[int, Any], Any]:
    """The graphs that would be replayed now, by wrapper and batch descriptor."""
    return {
        (number, descriptor): entry.cudagraph
        for number, wrapper in enumerate(runner.wrappers)
        for descriptor, entry in wrapper.concrete_cudagraph_entries.items()
    }


def test_each_level_has_all_graphs_of_vllm_on_its_own_stream(gpu: Gpu, runner: Runner) -> None:
    stock_bytes = runner.capture_model()
    stock = graphs_of(runner)
    stock_calls = len(runner.calls)
    for wrapper in runner.wrappers:
        wrapper.clear_graphs()
    ladder = Ladder(gpu)
    gpu.captured.clear()

    sets = GraphSets(runner, ladder)
    total_bytes = sets.capture(runner.capture_model)

    assert len(gpu.captured) == len(LEVELS) * len(stock)
    assert total_bytes == len(LEVELS) * stock_bytes > 0
    assert len(runner.calls) == (1 + len(LEVELS)) * stock_calls  # with warm-ups on each level
    seen = set()
    for level in LEVELS:
        sets.use(level)
        graphs = graphs_of(runner)
        assert graphs.keys() == stock.keys()
        streams = {graph.stream for graph in graphs.values()}
        if level.whole:
            # Each capture of vLLM's on a side stream, as ever: of the model, and of talker_mtp.
            assert streams.isdisjoint({gpu.default, *ladder.streams.values()})
        else:
            assert streams == {ladder.streams[level]}
        assert seen.isdisjoint(graphs.values())
        seen |= set(graphs.values())
    assert {graph.pool for graph in seen} == {current_platform.get_global_graph_pool()}
    assert gpu.current is gpu.default


def test_a_forward_replays_the_graphs_of_the_level_in_use(gpu: Gpu, runner: Runner) -> None:
    sets = GraphSets(runner, Ladder(gpu))
    sets.capture(runner.capture_model)
    captured = len(gpu.captured)
    for tokens, decode in product((1, 3, 4, 5), (False, True)):
        replayed: dict[Level, list[Any]] = {}
        outputs = set()
        for level in (WHOLE, LEVELS[0], LEVELS[1], LEVELS[0], LEVELS[0], WHOLE):
            gpu.replayed.clear()
            runner.calls.clear()
            sets.use(level)
            outputs.add((runner.forward(tokens, decode), tuple(runner.calls)))
            assert set(gpu.replayed) <= set(graphs_of(runner).values())
            assert replayed.setdefault(level, list(gpu.replayed)) == gpu.replayed
        # What is eager is so at every level; the rest comes from as many graphs, each its own.
        assert len(outputs) == 1
        mode, _ = runner.cudagraph_dispatcher.dispatch(tokens, decode)
        assert len({len(graphs) for graphs in replayed.values()}) == 1
        assert all(bool(graphs) == bool(mode) for graphs in replayed.values())
        for one, other in combinations(LEVELS, 2):
            assert set(replayed[one]).isdisjoint(replayed[other])
    assert len(gpu.captured) == captured


def test_after_capture_the_whole_is_in_use(gpu: Gpu, full: Runner) -> None:
    sets = GraphSets(full, Ladder(gpu))
    sets.capture(full.capture_model)
    before = graphs_of(full)
    sets.use(WHOLE)
    assert graphs_of(full) == before
    sets.use(Level(*LEVELS[0]))  # equal is enough
    assert graphs_of(full) != before


@pytest.mark.parametrize("failing", range(len(LEVELS)))
def test_a_level_that_fails_leaves_no_set(gpu: Gpu, full: Runner, failing: int) -> None:
    full.capture_model()
    per_level = len(gpu.captured)
    gpu.captured.clear()
    gpu.room = failing * per_level + 1
    stock = parallel_state.graph_capture
    sets = GraphSets(full, Ladder(gpu))
    with pytest.raises(RuntimeError, match=r"shared_sms=\d+.*the device is full") as caught:
        sets.capture(full.capture_model)
    assert str(LEVELS[failing]) in str(caught.value)

    assert not graphs_of(full)
    assert parallel_state.graph_capture is stock
    for level in LEVELS:
        with pytest.raises(ValueError, match="no CUDA graphs"):
            sets.use(level)
    # Nor may a forward make one on whatever stream it happens to run.
    gpu.room = 10_000
    with pytest.raises(RuntimeError, match="inappropriate time"):
        full.forward(SIZES[0], decode=True)


def test_capture_can_be_had_again_after_a_failure(gpu: Gpu, full: Runner) -> None:
    sets = GraphSets(full, Ladder(gpu))
    gpu.room = 0
    with pytest.raises(RuntimeError):
        sets.capture(full.capture_model)
    gpu.room = 10_000
    assert sets.capture(full.capture_model) > 0
    sets.use(LEVELS[0])
    assert graphs_of(full)


def test_an_unknown_level_is_refused_and_changes_nothing(gpu: Gpu, full: Runner) -> None:
    sets = GraphSets(full, Ladder(gpu))
    sets.capture(full.capture_model)
    before = graphs_of(full)
    with pytest.raises(ValueError, match="shared_sms=16"):
        sets.use(Level(16, 116))
    assert graphs_of(full) == before


def test_a_level_without_a_stream_is_refused(gpu: Gpu, full: Runner) -> None:
    ladder = Ladder(gpu)
    ladder.streams.clear()
    with pytest.raises(RuntimeError, match="no stream of its own"):
        GraphSets(full, ladder).capture(full.capture_model)
    assert not gpu.captured


def test_levels_with_different_graphs_are_refused(gpu: Gpu, full: Runner) -> None:
    def fewer_each_time() -> int:
        full.compilation_config.cudagraph_capture_sizes = SIZES[:-1]
        taken = full.capture_model()
        full.cudagraph_dispatcher.cudagraph_keys[CUDAGraphMode.FULL].pop()
        return taken

    with pytest.raises(RuntimeError, match="other graphs than"):
        GraphSets(full, Ladder(gpu)).capture(fewer_each_time)
    assert not graphs_of(full)


def test_clear_drops_every_set(gpu: Gpu, full: Runner) -> None:
    sets = GraphSets(full, Ladder(gpu))
    sets.capture(full.capture_model)
    gpu.captured.clear()
    assert live_graphs() > 0
    sets.clear()
    assert live_graphs() == 0
    with pytest.raises(ValueError):
        sets.use(WHOLE)


@pytest.mark.parametrize("own", [0, 2])
def test_graphs_of_the_model_itself_are_told(
    gpu: Gpu, full: Runner, vllm_log: pytest.LogCaptureFixture, own: int
) -> None:
    full.model_local = [torch.cuda.CUDAGraph() for _ in range(own)]
    assert live_graphs() == own
    GraphSets(full, Ladder(gpu)).capture(full.capture_model)
    told = [record.getMessage() for record in vllm_log.records if "own" in record.getMessage()]
    assert [message.split()[0] for message in told] == ([str(own)] if own else [])


def test_another_kind_of_runner_is_refused(gpu: Gpu) -> None:
    with pytest.raises(ValueError, match="SimpleNamespace"):
        GraphSets(SimpleNamespace(), Ladder(gpu))


@pytest.mark.parametrize("per_level", [False, True])
def test_an_eager_stage_can_be_capped(per_level: bool) -> None:
    assert refusal(make_config(CUDAGraphMode.NONE), per_level) is None


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_stage_with_graphs_can_be_capped_with_one_set_per_level(mode: CUDAGraphMode) -> None:
    config = make_config(mode)
    assert refusal(config, per_level=True) is None
    message = refusal(config, per_level=False)
    assert message is not None
    for word in (f"cudagraph_mode {mode}", "enforce_eager", "graphs_per_level"):
        assert word in message


def test_graphs_that_are_kept_elsewhere_cannot_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = CUDAGraphMode.FULL_AND_PIECEWISE
    assert "V2" in str(refusal(make_config(mode, use_v2_model_runner=True), per_level=True))
    config = make_config(mode)
    config.parallel_config.ubatch_size = 2
    assert "ubatch_size" in str(refusal(config, per_level=True))
    config.compilation_config.cudagraph_mm_encoder = True
    assert "cudagraph_mm_encoder" in str(refusal(config, per_level=True))
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    message = str(refusal(make_config(mode), per_level=True))
    assert "VLLM_USE_BREAKABLE_CUDAGRAPH" in message
    assert "enforce_eager" in message


def test_activating_a_level_takes_its_graphs_along(gpu: Gpu, full: Runner) -> None:
    sets = GraphSets(full, Ladder(gpu))
    with sets.activate(sets.levels[0]):
        pass  # vLLM profiles before there is a graph
    sets.capture(full.capture_model)
    for level in (*sets.levels, sets.levels[0]):
        with sets.activate(level):
            assert sets._in_use is level
