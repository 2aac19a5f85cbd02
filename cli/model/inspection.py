"""What ``inspect`` shows of a checkpoint: its types, and the engines that can be built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from specbuild.builder.backends.cuda.gpus import GpuModel
from specbuild.builder.backends.registry import BACKENDS
from specbuild.builder.checkpoint.quantization.registry import QuantizationSummary
from specbuild.builder.checkpoint.target_parts import HEAD, TargetCheckpoint
from specbuild.builder.engine.pool_sizes import slots_for
from specbuild.builder.engine.sizes import EngineSizes, require_seq_len
from specbuild.builder.inputs import BuildInputs, read_checkpoints, settled_inputs
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.cli.model.digests import checkpoint_files
from specbuild.runtime.cache.state_layout import state_bytes
from specbuild.runtime.device import group_bytes
from specbuild.runtime.engine_dir.cache_groups import group_pages
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError

# Context lengths for which a GPU's capacity is shown.
_CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
# An allowance, not a measurement, for the CUDA context, kernels, scratch and the driver.
_RESERVED_BYTES = 3 << 30
MAX_BATCH = 256
_SCALES = ("_scales", "_scale", "_scale_inv")
# A byte of MXFP4 blocks holds two values.
_BLOCK_BYTE_VALUES = 2
_FP32_BYTES = 4


@dataclass(frozen=True)
class BackendAnswer:
    """Whether a backend can build the checkpoint; ``reason`` explains a refusal.

    ``weights_bytes`` is the size of the weights in the types of its engines, and an upper bound for
    a quantized checkpoint, whose weights count as dequantized. Only the MXFP4 experts of GPUs keep
    their size. ``cache_bytes`` is the size of the caches at the default limits.
    """

    backend: str
    reason: str | None
    weights_bytes: int | None = None
    cache_bytes: int | None = None


@dataclass(frozen=True)
class Capacity:
    """The number of sequences of ``tokens`` tokens that fit a GPU in addition to the weights."""

    tokens: int
    sequences: int


@dataclass(frozen=True)
class CheckpointReport:
    """The output of ``inspect --json`` for a checkpoint.

    ``types`` counts tensors by type, ``parameters`` their elements in the types of computation.
    ``quantization`` is the scheme of a quantized checkpoint. ``capacity`` is for the GPU of
    ``--gpu``.
    """

    model: str
    files: int
    file_bytes: int
    types: dict[str, int]
    parameters: int
    target: TargetGeometry
    has_tokenizer: bool
    warnings: tuple[str, ...]
    backends: tuple[BackendAnswer, ...]
    quantization: QuantizationSummary | None = None
    gpu: str | None = None
    gpu_bytes: int | None = None
    capacity: tuple[Capacity, ...] = ()


def checkpoint_report(
    title: str, options: BuildOptions, gpu: GpuModel | None = None
) -> CheckpointReport:
    """Read the headers of a checkpoint, and check for every backend whether it can build it.

    ``options`` name the checkpoint, its drafts and limits; their backend is ignored. Raises
    SpecbuildError if the checkpoint cannot be read, and for limits that no backend supports.
    """
    target, drafts = read_checkpoints(options, SilentProgress())
    if options.limits.max_seq_len is not None:
        require_seq_len(options.limits.max_seq_len, target.geometry)
    inputs = {name: _inputs(name, options, (target, drafts)) for name in BACKENDS}
    files = checkpoint_files(options.model)
    cuda = inputs["cuda"]
    capacity: Sequence[Capacity] = ()
    if gpu is not None and isinstance(cuda, BuildInputs):
        capacity = gpu_capacity(cuda.sources.stored_bytes, cuda.engine_sizes, target.geometry, gpu)
    return CheckpointReport(
        model=title,
        files=len(files),
        file_bytes=sum(file.stat().st_size for file in files),
        types=_types(target),
        parameters=_parameters(target),
        target=target.geometry,
        has_tokenizer=bool(target.text_files),
        warnings=target.warnings,
        backends=tuple(_answer(name, result) for name, result in inputs.items()),
        quantization=target.quantization,
        gpu=None if gpu is None else gpu.title,
        gpu_bytes=None if gpu is None else gpu.memory_bytes,
        capacity=tuple(capacity),
    )


def gpu_capacity(
    weights_bytes: int, engine_sizes: EngineSizes, target: TargetGeometry, gpu: GpuModel
) -> list[Capacity]:
    """Return how many sequences fit ``gpu`` at once, for context lengths up to the model's.

    Sequences allocate full pages of each group and their recurrent states. An allowance remains
    for the driver and scratch memory.
    """
    free = gpu.memory_bytes - _RESERVED_BYTES - weights_bytes
    lengths = {n for n in _CONTEXTS if n < target.max_positions} | {target.max_positions}
    result = []
    for tokens in sorted(lengths):
        limits = replace(engine_sizes.limits, max_seq_len=tokens, max_batch_size=1)
        sequence_bytes = sum(
            group_pages(group, limits, tokens=tokens)
            * group_bytes(replace(group, pages=1), engine_sizes.specpv)
            for group in engine_sizes.groups
        )
        sequence_bytes += sum(
            state_bytes(replace(group, slots=slots_for(limits)), limits, "cuda")
            for group in engine_sizes.states
        )
        result.append(Capacity(tokens, max(0, min(MAX_BATCH, free // sequence_bytes))))
    return result


def _inputs(
    name: str, options: BuildOptions, checkpoints: tuple[TargetCheckpoint, tuple[object, ...]]
) -> BuildInputs | SpecbuildError:
    """Return what a backend would build, or its reason for refusal."""
    backend = BACKENDS[name]  # type: ignore[index]
    chosen = replace(options, backend=name, gpu=None)  # type: ignore[arg-type]
    try:
        return settled_inputs(chosen, backend, checkpoints)  # type: ignore[arg-type]
    except SpecbuildError as error:
        return error


def _answer(name: str, result: BuildInputs | SpecbuildError) -> BackendAnswer:
    if isinstance(result, SpecbuildError):
        return BackendAnswer(name, str(result))
    engine_sizes = result.engine_sizes
    caches = sum(group_bytes(group, engine_sizes.specpv) for group in engine_sizes.groups)
    caches += sum(state_bytes(group, engine_sizes.limits, name) for group in engine_sizes.states)
    weights = result.sources.stored_bytes
    if BACKENDS[name].activations is None:  # type: ignore[index]
        # The graphs of a CPU engine have the checkpoint's types, and its weights are fp32.
        weights = _FP32_BYTES * _parameters(result.target)
    return BackendAnswer(name, None, weights, caches)


def _types(target: TargetCheckpoint) -> dict[str, int]:
    """Return the number of tensors by type in the file, most frequent first."""
    counts: Counter[str] = Counter()
    for by_type in target.source_types.values():
        counts.update(by_type)
    if not counts:
        counts.update(tensor.dtype for tensor in target.tensors.values())
    return dict(counts.most_common())


def _parameters(target: TargetCheckpoint) -> int:
    """Return the elements of all tensors, without scales of quantized blocks and a tied head."""
    return sum(
        prod(tensor.shape) * (_BLOCK_BYTE_VALUES if name.endswith("_blocks") else 1)
        for name, tensor in target.tensors.items()
        if not name.endswith(_SCALES) and not (target.geometry.tied_head and name == HEAD)
    )
