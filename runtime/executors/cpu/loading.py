"""Opens an engine of ONNX graphs: checked against this machine, its weights memory-mapped."""

from __future__ import annotations

from pathlib import Path

from specbuild.runtime.device import Device
from specbuild.runtime.engine_dir.files import read_file
from specbuild.runtime.engine_dir.manifest import WEIGHTS_FILE, Manifest
from specbuild.runtime.engine_dir.weights_file import open_weights
from specbuild.runtime.errors import UnsupportedHereError
from specbuild.runtime.executors.cpu.check import reasons_here
from specbuild.runtime.executors.cpu.executor import CpuExecutor
from specbuild.runtime.executors.cpu.graphs import read_graphs
from specbuild.runtime.executors.executor import OpenedEngine

# Every graph has threads of its own: without a bound a slip of the pen takes the machine down.
MAX_THREADS = 64


def open_engine(
    directory: Path, manifest: Manifest, here: Device, *, threads: int | None, gpu: int
) -> OpenedEngine:
    """The engine on the CPU; None ``threads`` is one, which is fastest for small models.

    Raises UnsupportedHereError where it does not run here, EngineFileError for a damaged file.
    """
    del gpu
    threads = 1 if threads is None else threads
    most = max(here.cores, MAX_THREADS)
    if not 1 <= threads <= most:
        raise UnsupportedHereError(
            f"threads is {threads}, must lie between 1 and {most}; this machine has "
            f"{here.cores} cores"
        )
    reasons = reasons_here(directory, manifest, here)
    if reasons:
        raise UnsupportedHereError(f"{directory} does not run here: {'; '.join(reasons)}")
    graphs = read_graphs(directory, manifest)
    for name in manifest.files.keys() - graphs.keys() - {WEIGHTS_FILE}:
        read_file(directory, manifest, name)
    weights = open_weights(directory, manifest) if manifest.tensors else {}
    executor = CpuExecutor(manifest, graphs, weights, threads=threads)
    return OpenedEngine(executor, here.cpu_name, (threads, here.onnxruntime))
