"""``specbuild build``: read, export, lower, write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from specbuild.builder import graphs
from specbuild.builder.backends.backend import Lowered, PortableGraphs
from specbuild.builder.backends.cuda.report import CudaReport
from specbuild.builder.backends.registry import backend_of
from specbuild.builder.backends.tensorrt.request import RoleReport
from specbuild.builder.checkpoint.quantization.registry import QuantizationSummary
from specbuild.builder.engine.cache_capacity import CacheCapacity, cache_capacity
from specbuild.builder.engine.manifest import BuiltParts, engine_manifest, graph_file
from specbuild.builder.engine.writer import (
    EngineFolder,
    json_bytes,
    require_replaceable,
    require_space,
    staged_engine,
    weight_bytes,
)
from specbuild.builder.graph.passes.pipeline import PassResult
from specbuild.builder.inputs import BuildInputs, Checkpoints, read_checkpoints, settled_inputs
from specbuild.builder.kept_graphs import keep_graphs, require_new_folder
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import Progress
from specbuild.plugins_cuda.launches import Unsupported
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError

_REPORT_FILE = "build_report.json"


@dataclass(frozen=True)
class BuildReport:
    """The report of a build: passes by role, bytes written, and what a GPU will run.

    ``draft_dtype`` is the storage of the draft's weights. ``refused`` has the kernels and sizes
    that were replaced by others, with reasons; ``caches`` the capacity of the KV caches;
    ``converted`` the tensors with another float type in the graphs than in the checkpoint.
    ``source_types`` counts the types of the tensors of a GGUF file or a quantized checkpoint, by
    their kind; ``quantization`` is the checkpoint's scheme.

    Equal builds have equal reports.
    """

    passes: tuple[PassResult, ...]
    weight_bytes: int
    graph_bytes: dict[str, int]
    warnings: tuple[str, ...]
    caches: CacheCapacity
    draft_dtype: str | None = None
    converted: dict[str, tuple[str, ...]] = field(default_factory=dict)
    source_types: dict[str, dict[str, int]] = field(default_factory=dict)
    quantization: QuantizationSummary | None = None
    refused: tuple[Unsupported, ...] = ()
    cuda: CudaReport | None = None
    tensorrt: dict[str, RoleReport] = field(default_factory=dict)


def build(
    options: BuildOptions,
    progress: Progress,
    *,
    checkpoints: Checkpoints | None = None,
    check: Callable[[TargetGeometry], None] | None = None,
) -> BuildReport:
    """Build the engine directory ``options.output``: read, export, lower, write.

    ``checkpoints`` replace those of ``options.model`` and ``options.draft``, which are not read.
    ``check`` is called with the target's geometry before the export, and raises SpecbuildError to
    refuse it. Raises SpecbuildError for a wrong option, checkpoint or disk; then nothing remains
    except the graphs of ``options.keep_onnx`` if they were complete.
    """
    backend = backend_of(options.backend)
    own_options = backend.options(options)
    _require_places(options, (options.model, *options.drafts) if checkpoints is None else ())
    checkpoints = checkpoints or read_checkpoints(options, progress)
    if check is not None:
        check(checkpoints[0].geometry)
    inputs = settled_inputs(options, backend, checkpoints)
    for note in inputs.notes(options):
        progress.note(note)
    for warning in inputs.warnings:
        progress.note(f"warning: {warning}")
    if options.keep_onnx is not None:
        keep_graphs(options.keep_onnx, options.portable_dtype, inputs, progress)
    models = graphs.export_graphs(inputs.sources, inputs.engine_sizes, progress)
    lowered = backend.lower(
        PortableGraphs(models, inputs.engine_sizes, inputs.sources), own_options, progress
    )
    return _written(options, inputs, own_options.device, lowered, progress)


def _require_places(options: BuildOptions, read: Sequence[Path]) -> None:
    """Raise SpecbuildError if an output path is in use; ``read`` are the checkpoints."""
    output = options.output.resolve()
    _require_apart(options, output, read)
    if options.dump_passes is not None and options.dump_passes.is_file():
        raise SpecbuildError(f"--dump-passes {options.dump_passes} is a file; give a directory")
    if options.keep_onnx is not None:
        require_new_folder(options.keep_onnx)
    elif options.portable_dtype is not None:
        raise SpecbuildError(
            "--portable-dtype is the type of --keep-onnx's graphs; add --keep-onnx DIR"
        )
    require_replaceable(output, force=options.force)


def _require_apart(options: BuildOptions, output: Path, read: Sequence[Path]) -> None:
    """Check that the engine would replace nothing that the build reads or also writes."""
    outputs = (
        options.dump_passes,
        options.keep_onnx,
        options.kernels.tactics,
        options.tensorrt.timing_cache,
    )
    for input_path in (*read, *outputs):
        if input_path is not None and output in (
            input_path.resolve(),
            *input_path.resolve().parents,
        ):
            raise SpecbuildError(
                f"--output {options.output} would replace {input_path}; choose another place"
            )


def _written(
    options: BuildOptions,
    inputs: BuildInputs,
    device: str,
    lowered: Lowered,
    progress: Progress,
) -> BuildReport:
    """Write the directory, and return its report. Raises SpecbuildError for a full disk."""
    output, target = options.output.resolve(), inputs.target
    size = weight_bytes(lowered.weights)
    progress.note(f"the engine stores {size / 1e6:.1f} MB of weights")
    # For an engine that stores its own weights, they are in a separate file during the build.
    stores_weights = lowered.build_tensorrt is not None and not lowered.stores_separate_weights
    require_space(output.parent, 2 * size if stores_weights else size)
    report = BuildReport(
        passes=lowered.passes,
        weight_bytes=size,
        graph_bytes={
            graph_file(role): len(lowered.files[graph_file(role)])
            for role in lowered.models
            if graph_file(role) in lowered.files
        },
        warnings=inputs.warnings,
        caches=cache_capacity(
            lowered.engine_sizes.groups,
            lowered.engine_sizes.limits,
            lossy=lowered.engine_sizes.specpv is not None or lowered.engine_sizes.dsa is not None,
        ),
        draft_dtype=inputs.drafts[0].geometry.dtype if inputs.drafts else None,
        converted=inputs.sources.converted,
        source_types=inputs.target.source_types,
        quantization=inputs.target.quantization,
        refused=lowered.refused,
        cuda=lowered.cuda,
    )
    stored = {} if stores_weights else lowered.weights
    parts = BuiltParts(
        target,
        inputs.drafts,
        lowered.engine_sizes,
        lowered.models,
        stored,
        inputs.warnings,
        device,
        quantized=lowered.quantized,
    )
    with staged_engine(output, force=options.force) as folder:
        if lowered.build_tensorrt is not None:
            tensorrt, reports = lowered.build_tensorrt(folder)
            parts = replace(
                parts, tensorrt=tensorrt, device=",".join(tensorrt.build.compute_capabilities)
            )
            report = replace(report, tensorrt=reports)
        _write(folder, parts, lowered.files, report, progress)
        progress.start("reading back", 1, "step")
        folder.seal(engine_manifest(options, parts, folder.stored_files()))
    return report


def _write(
    folder: EngineFolder,
    parts: BuiltParts,
    files: dict[str, bytes],
    report: BuildReport,
    progress: Progress,
) -> None:
    for name, data in files.items():
        folder.write(name, data)
    for file in parts.target.text_files:
        folder.write(file.name, file.read_bytes())
    folder.write(_REPORT_FILE, json_bytes(report))
    if parts.weights:
        folder.write_weights(parts.weights, progress)
