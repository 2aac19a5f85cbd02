"""``build --keep-onnx DIR``: portable graphs that any ONNX tool opens, with their weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from specbuild.builder import graphs
from specbuild.builder.backends.backend import collected_weights
from specbuild.builder.durable import put_in_place, staging_folder
from specbuild.builder.engine.writer import EngineFolder, require_space, weight_bytes, weight_places
from specbuild.builder.graph.op_functions import add_functions
from specbuild.builder.graph.passes.portable import portable_bytes
from specbuild.builder.graph.weight_sources import WeightSources
from specbuild.builder.inputs import BuildInputs
from specbuild.builder.progress import Progress
from specbuild.runtime.errors import SpecbuildError

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def require_new_folder(folder: Path) -> None:
    """Raise SpecbuildError if the graphs' folder is not empty."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise SpecbuildError(f"--keep-onnx {folder} is not empty; remove it or choose another")


def keep_graphs(folder: Path, dtype: str | None, inputs: BuildInputs, progress: Progress) -> None:
    """Write ``<role>.onnx`` of every role and ``weights.safetensors`` into a new folder.

    ``dtype`` is the type of every float tensor and activation, None for that of the engine's source
    graphs. Raises SpecbuildError if the disk has too little space; nothing remains then.
    """
    sources = inputs.sources
    if dtype is not None:
        sources = WeightSources(inputs.target, inputs.drafts, _DTYPES[dtype])
    models = graphs.export_graphs(sources, inputs.engine_sizes, progress)
    weights = collected_weights(models)
    size = weight_bytes(weights)
    progress.note(
        f"{folder}: the portable graphs get a copy of the checkpoint's tensors, {size / 1e6:.1f} MB"
    )
    folder = folder.resolve()
    require_space(folder.parent, size, option="--keep-onnx")
    places = weight_places(weights)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = staging_folder(folder)
    try:
        written = EngineFolder(staging)
        for role, model in models.items():
            add_functions(model)
            written.write(f"{role}.onnx", portable_bytes(model, places))
        written.write_weights(weights, progress)
        staging.chmod(0o755)
        require_new_folder(folder)
        put_in_place(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
