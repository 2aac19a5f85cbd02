"""Opens an engine of ONNX graphs: checked against this machine, its weights memory-mapped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specbuild.runtime.device import Device
from specbuild.runtime.engine_dir.files import read_file
from specbuild.runtime.engine_dir.manifest import WEIGHTS_FILE, Manifest
from specbuild.runtime.engine_dir.weights_file import open_weights
from specbuild.runtime.errors import UnsupportedHereError
from specbuild.runtime.executors.cpu.check import reasons_here
from specbuild.runtime.executors.cpu.executor import CpuExecutor, run_probe
from specbuild.runtime.executors.cpu.graphs import check_probe, read_graphs
from specbuild.runtime.executors.cpu.row_padding import PROBE_FILE, padding_here
from specbuild.runtime.executors.executor import OpenedEngine

# Every graph has its own threads, so a typing error without this limit would block the machine.
MAX_THREADS = 64
# Engines with weights of fewer bytes run in one thread by default.
SMALL_WEIGHTS, MAX_DEFAULT_THREADS = 64 << 20, 8


def open_engine(
    directory: Path, manifest: Manifest, here: Device, *, threads: int | None, gpus: Sequence[int]
) -> OpenedEngine:
    """Return the engine on the CPU; the default is :func:`default_threads`.

    Raises UnsupportedHereError if it does not run here, EngineFileError for a damaged file.
    """
    del gpus
    threads = default_threads(manifest, here) if threads is None else threads
    limit = max(here.cores, MAX_THREADS)
    if not 1 <= threads <= limit:
        raise UnsupportedHereError(
            f"threads is {threads}, must lie between 1 and {limit}; this machine has "
            f"{here.cores} cores"
        )
    reasons = reasons_here(directory, manifest, here)
    if reasons:
        raise UnsupportedHereError(f"{directory} does not run here: {'; '.join(reasons)}")
    graphs = read_graphs(directory, manifest)
    others = manifest.files.keys() - graphs.keys() - {WEIGHTS_FILE}
    read = {name: read_file(directory, manifest, name) for name in others}
    weights = open_weights(directory, manifest) if manifest.tensors else {}
    padding = None
    # An added row would advance the state of a recurrent layer.
    if PROBE_FILE in read and not manifest.state_groups:
        probe = check_probe(directory, PROBE_FILE, bytes(read[PROBE_FILE]))
        padding = padding_here(run_probe(probe, threads))
    executor = CpuExecutor(manifest, graphs, weights, threads=threads, padding=padding)
    return OpenedEngine(executor, here.cpu_name, (threads, here.onnxruntime))


def default_threads(manifest: Manifest, here: Device) -> int:
    """Return 1 for small models, whose threads would wait for each other longer than compute.

    Otherwise return the physical cores that this process may use, up to 8.
    """
    stored = manifest.files.get(WEIGHTS_FILE)
    if stored is None or stored.bytes < SMALL_WEIGHTS:
        return 1
    return min(here.physical_cores, MAX_DEFAULT_THREADS)
