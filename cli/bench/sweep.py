"""``specbuild bench sweep``: every phase of a CUDA engine against the bytes it must read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from specbuild.cli.bench.budget import Budget
from specbuild.cli.bench.prompts import time_prefill
from specbuild.cli.bench.report import (
    SWEEPS,
    Decoding,
    KernelTime,
    LayerLaunch,
    Load,
    Phase,
    SweepReport,
)
from specbuild.cli.bench.runs import SpecSweep, time_fresh_process
from specbuild.cli.bench.steps import STEP_SWEEPS, StepSweep
from specbuild.cli.bench.table import decoding_line, load_line, phase_line
from specbuild.cli.bench.views import RETRIEVED_TOKENS, VIEW_SWEEP, ViewSweep
from specbuild.cli.terminal import console
from specbuild.cli.terminal.engine_loading import load_engine
from specbuild.cli.terminal.prompt_file import read_prompt_file, tokenised
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.errors import SpecbuildError, UnsupportedHereError
from specbuild.runtime.executors.cuda.memory import footprint
from specbuild.runtime.measure.benchmark_batch import cuda_executor
from specbuild.runtime.measure.byte_floor import engine_traffic

if TYPE_CHECKING:
    from specbuild.runtime.engine import Engine
    from specbuild.runtime.executors.cuda.gpu import Gpu
    from specbuild.runtime.measure.anatomy import StepAnatomy
    from specbuild.runtime.measure.read_speed import ReadKernel
    from specbuild.runtime.request import Prompt

BATCHES = (1, 4, 16, 64)
CONTEXTS = (1000, 32768, 131072)
PROMPT_TOKENS = (512, 2048, 8192)
SPEC_BATCHES = (1, 16)
FRESH_PROCESSES = 2
DEFAULT_LIMIT_S = 120.0
_RANDOM_SEED = 1


@dataclass(frozen=True)
class SweepSettings:
    """The measurements. ``limit_s`` limits the time of steps, prompts and decoding, each."""

    sweeps: tuple[str, ...]
    prompts: Sequence[Path] = ()
    batches: Sequence[int] = BATCHES
    contexts: Sequence[int] = CONTEXTS
    retrieved: Sequence[int] = RETRIEVED_TOKENS
    max_new_tokens: int = 128
    rounds: int = 3
    raw: bool = False
    limit_s: float = DEFAULT_LIMIT_S
    repeats: int = 30


@dataclass
class Progress:
    """The measurements so far; every row is also printed to standard error."""

    say: Callable[[str], None]
    phases: list[Phase] = field(default_factory=list)
    kernels: list[KernelTime] = field(default_factory=list)
    timeline: list[LayerLaunch] = field(default_factory=list)
    anatomies: list[StepAnatomy] = field(default_factory=list)
    decoding: list[Decoding] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def phase(self, found: Phase) -> None:
        """Add a row."""
        self.phases.append(found)
        self.say(phase_line(found))

    def decoded(self, found: Decoding) -> None:
        """Add a row of decoding."""
        self.decoding.append(found)
        self.say(decoding_line(found))


def sweeps_of(text: str) -> tuple[str, ...]:
    """Parse ``decode,spec`` in the order of measuring; SpecbuildError names an unknown one."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in names if part not in SWEEPS]
    if unknown or not names:
        got = ", ".join(unknown) or "nothing"
        raise SpecbuildError(f"PHASES got {got}, expected some of {','.join(SWEEPS)}")
    return tuple(sweep for sweep in SWEEPS if sweep in names)


def run_sweep(directory: Path, settings: SweepSettings) -> SweepReport:
    """Load the engine and measure; UnsupportedHereError for an engine of another backend."""
    manifest = read_manifest(directory)
    if not facts_of(manifest.backend).has_plan:
        raise UnsupportedHereError(
            f"bench sweep measures CUDA engines, {directory} was built for {manifest.backend}; use "
            "bench pairs, or build it with --backend cuda"
        )
    progress = Progress(lambda line: console.messages().print(line, soft_wrap=True))
    with _opened_gpu() as gpu:
        fresh = _fresh_processes(directory, manifest, progress) if "load" in settings.sweeps else ()
        free_bytes = gpu.free_bytes()
        started_s = perf_counter()
        engine = load_engine(directory)
        load_s = perf_counter() - started_s
        try:
            load = None
            if "load" in settings.sweeps:
                load = _loaded(engine, load_s, fresh, free_bytes)
                progress.say(load_line(load))
            ceiling = _ceiling(engine, progress)
            measure(engine, settings, ceiling, _prompts(engine, directory, settings), progress)
            facts = gpu.facts
        finally:
            cuda_executor(engine).close()
    major, minor = divmod(facts.driver_version // 10, 100)
    return SweepReport(
        gpu=f"{facts.name}, CUDA {major}.{minor}",
        engine=directory.name,
        ceiling_bytes_per_s=ceiling,
        phases=tuple(progress.phases),
        kernels=tuple(progress.kernels),
        decoding=tuple(progress.decoding),
        load=load,
        left_out=tuple(progress.left_out),
        timeline=tuple(progress.timeline),
        anatomies=tuple(progress.anatomies),
    )


def measure(
    engine: Engine,
    settings: SweepSettings,
    ceiling_bytes_per_s: float | None,
    prompts: Sequence[Prompt],
    progress: Progress,
) -> None:
    """Run the sweeps that need only the engine."""
    executor, max_batch = cuda_executor(engine), engine.manifest.limits.max_batch_size
    traffic = engine_traffic(executor.plan, executor.runner.described)
    batches = [batch for batch in settings.batches if batch <= max_batch] or [max_batch]
    progress.left_out += [
        f"batch {b}: the engine takes {max_batch} sequences"
        for b in settings.batches
        if b > max_batch
    ]
    steps = [sweep for sweep in STEP_SWEEPS if sweep in settings.sweeps]
    if steps:
        budget = Budget.of(settings.limit_s, progress.left_out)
        sweep = StepSweep(
            engine,
            traffic,
            ceiling_bytes_per_s,
            steps,
            settings.repeats,
            progress.kernels,
            progress.timeline,
            progress.anatomies,
        )
        sweep.run(batches, settings.contexts, budget, progress.phase)
    if VIEW_SWEEP in settings.sweeps and engine.manifest.specpv is None:
        progress.left_out.append("specpv: the engine was built without --specpv")
    elif VIEW_SWEEP in settings.sweeps:
        budget = Budget.of(settings.limit_s, progress.left_out)
        views = ViewSweep(
            engine,
            traffic,
            ceiling_bytes_per_s,
            settings.repeats,
            progress.kernels,
            retrieved=settings.retrieved,
        )
        views.run(batches, settings.contexts, budget, progress.phase)
    if "prefill" in settings.sweeps:
        budget = Budget.of(settings.limit_s, progress.left_out)
        time_prefill(
            engine,
            PROMPT_TOKENS,
            budget,
            progress.phase,
            traffic=traffic,
            ceiling_bytes_per_s=ceiling_bytes_per_s,
        )
    if "spec" in settings.sweeps:
        budget = Budget.of(settings.limit_s, progress.left_out)
        spec = SpecSweep(engine, prompts, settings.max_new_tokens, settings.rounds, settings.raw)
        spec.run([b for b in SPEC_BATCHES if b in batches] or batches[:1], budget, progress.decoded)


def stream_kernel(gpu: str) -> ReadKernel:
    """Return the streaming read compiled for a GPU; may raise SpecbuildError or ImportError."""
    from specbuild.builder.backends.cuda.compile.nvrtc import Compiler, required
    from specbuild.plugins_cuda.launches import Kernel
    from specbuild.runtime.measure.read_speed import ReadKernel

    kernel = Kernel("_device", "stream_read", file="stream_read.cu")
    compiled = required(Compiler(gpu).compile([kernel], lambda: None))
    return ReadKernel(compiled.files[compiled.kernels[kernel].cubin], kernel.entry)


def ceiling_of(engine: Engine) -> float:
    """Return the bytes per second of a streaming read; may raise SpecbuildError or ImportError."""
    from specbuild.runtime.measure.read_speed import streaming_read

    executor = cuda_executor(engine)
    return streaming_read(executor.runner.gpu, stream_kernel(executor.plan.gpu))


def _ceiling(engine: Engine, progress: Progress) -> float | None:
    try:
        found = ceiling_of(engine)
    except (ImportError, SpecbuildError) as error:
        progress.left_out.append(f"the bandwidth of a streaming read: {error}")
        return None
    progress.say(f"streaming read: {found / 1e12:.3f} TB/s")
    return found


def _prompts(engine: Engine, directory: Path, settings: SweepSettings) -> list[Prompt]:
    """Return ``--prompts``, else the prompts of ``synth`` next to the engine, else random ones."""
    from specbuild.cli.bench.pairs import random_prompts
    from specbuild.runtime.request import GenerateParams

    files = list(settings.prompts)
    prompt_file = directory.with_name(f"{directory.name}.prompts.jsonl")
    if not files and prompt_file.is_file():
        files = [prompt_file]
    if not files:
        longest = max(1, engine.manifest.limits.max_seq_len // 2)
        vocab = engine.manifest.target.vocab
        return list(random_prompts(vocab, longest, seed=_RANDOM_SEED).prompts)
    params = GenerateParams(max_new_tokens=settings.max_new_tokens, raw=settings.raw)
    placed = [prompt for file in files for prompt in read_prompt_file(file)]
    return tokenised(engine, placed, params)


def _fresh_processes(directory: Path, manifest: Manifest, progress: Progress) -> tuple[float, ...]:
    """Measure before this process loads the engine: device memory may not suffice for two."""
    times = []
    for _ in range(FRESH_PROCESSES):
        times.append(time_fresh_process(directory, manifest.target.vocab))
        progress.say(f"load: a fresh process gave its first token after {times[-1]:.2f} s")
    return tuple(times)


def _loaded(engine: Engine, load_s: float, fresh: tuple[float, ...], free_bytes: int) -> Load:
    """Memory is looked at after some tokens, when kernels and graphs are there."""
    from specbuild.runtime.request import GenerateParams, Prompt

    prompt = Prompt("first", prompt_ids=(1, 2, 3))
    for _ in engine.generate([prompt], GenerateParams(max_new_tokens=8, ignore_eos=True)):
        pass
    executor = cuda_executor(engine)
    gpu, planned = executor.runner.gpu, footprint(executor.plan)
    used_bytes = free_bytes - gpu.free_bytes()
    return Load(
        load_s=load_s,
        first_token_s=fresh,
        weights_bytes=planned.weights,
        cache_bytes=planned.cache,
        beyond_bytes=used_bytes - planned.weights - planned.cache,
        context_bytes=gpu.facts.total_bytes - free_bytes,
    )


@contextmanager
def _opened_gpu() -> Iterator[Gpu]:
    """Return the GPU with a context, so that its memory is not counted as the engine's."""
    from specbuild.runtime.executors.cuda.driver import open_gpu

    gpu = open_gpu()
    try:
        yield gpu
    finally:
        gpu.close()
