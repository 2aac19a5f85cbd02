"""Opens a TensorRT engine: checks it against this machine, then loads weights and roles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from specbuild.runtime.device import Device
from specbuild.runtime.engine_dir.files import check_chunk, read_file
from specbuild.runtime.engine_dir.manifest import WEIGHTS_FILE, Manifest
from specbuild.runtime.engine_dir.weights_file import weight_spans
from specbuild.runtime.errors import OutdatedEngineError, UnsupportedHereError
from specbuild.runtime.executors.cuda.driver import open_gpu
from specbuild.runtime.executors.cuda.gpu import Gpu
from specbuild.runtime.executors.cuda.upload import Piece, WeightsUpload
from specbuild.runtime.executors.executor import OpenedEngine
from specbuild.runtime.executors.tensorrt.check import built_by, reasons_here
from specbuild.runtime.executors.tensorrt.creators import register_creators
from specbuild.runtime.executors.tensorrt.executor import RoleSession, TensorRtExecutor
from specbuild.runtime.executors.tensorrt.launched_role import read_launched_role
from specbuild.runtime.executors.tensorrt.library import last_error, load, new_runtime
from specbuild.runtime.executors.tensorrt.sessions import EngineSession, LaunchedSession

_ENGINE = ".engine"
_ALIGNMENT = 512
_RESERVE_BYTES = 256 << 20


def open_engine(
    directory: Path, manifest: Manifest, here: Device, *, threads: int | None, gpus: Sequence[int]
) -> OpenedEngine:
    """Return the engine on this machine's first GPU; a thread per core loads the weights.

    A role is deserialized at its first run. Raises UnsupportedHereError before anything is loaded
    if it does not run here, EngineFileError if a file is damaged.
    """
    del threads, gpus  # The host computes nothing; plugins run on the first GPU.
    reasons = reasons_here(directory, manifest, here)
    if reasons:
        raise UnsupportedHereError(f"{directory} does not run here: {'; '.join(reasons)}")
    library = load(manifest.backend)
    # TensorRT keeps the creators, and therefore their GPU, for the life of the process.
    register_creators(library, built_by(manifest).plugins, _process_gpu)
    opened = open_gpu()
    try:
        weights = load_weights(opened, directory, manifest, readers=here.cores)
        opener = session_opener(library, opened, directory, manifest)
        executor = TensorRtExecutor(
            opened, manifest, opener, weights.addresses, release_weights=weights.release
        )
        return OpenedEngine(executor, executor.gpu_name)
    except BaseException:
        opened.close()
        raise


def session_opener(
    library: Any, gpu: Gpu, directory: Path, manifest: Manifest
) -> Callable[[str], RoleSession]:
    """Return a function that prepares a role; UnsupportedHereError if TensorRT refuses it."""
    errors: list[str] = []
    runtime = new_runtime(library, errors)

    def open_session(name: str) -> RoleSession:
        role = manifest.roles[name]
        data = bytes(read_file(directory, manifest, role.file))
        if not role.file.endswith(_ENGINE):
            where = f"{directory}: {role.file}"
            return LaunchedSession(gpu, read_launched_role(data, where, len(role.profiles)))
        engine = runtime.deserialize_cuda_engine(data)
        if engine is None:
            report = f" ({last_error(errors)})" if errors else ""
            raise UnsupportedHereError(
                f"{directory}: TensorRT {library.__version__} refuses {role.file}{report}; build "
                "the engine again on this machine"
            )
        return EngineSession(library, gpu, engine, name, errors)

    return open_session


@dataclass(frozen=True)
class DeviceWeights:
    """Tensors on the device, their addresses by name; ``release`` releases their memory."""

    addresses: Mapping[str, int]
    release: Callable[[], None]


def load_weights(gpu: Gpu, directory: Path, manifest: Manifest, *, readers: int) -> DeviceWeights:
    """Load the tensors that roles name. Raises UnsupportedHereError if they do not fit."""
    names = dict.fromkeys(name for role in manifest.roles.values() for name in role.tensors)
    if not names:
        return DeviceWeights({}, lambda: None)
    places, total = _places(names, weight_spans(directory, manifest))
    free = gpu.free_bytes()
    if total + _RESERVE_BYTES > free:
        raise UnsupportedHereError(
            f"the weights take {total / 2**30:.2f} GiB of device memory, {free / 2**30:.2f} are "
            "free; close what else uses the GPU"
        )
    base = gpu.allocate(total)
    upload = WeightsUpload(
        gpu,
        gpu.new_stream(),
        readers=readers,
        check=lambda chunk, digest: check_chunk(directory, manifest, WEIGHTS_FILE, chunk, digest),
    )
    pieces = [Piece(offset, size, base + place) for offset, size, place in places.values()]
    upload.run(directory / WEIGHTS_FILE, manifest.files[WEIGHTS_FILE], pieces)
    addresses = {name: base + place for name, (_, _, place) in places.items()}
    return DeviceWeights(addresses, lambda: gpu.release(base))


def _places(
    names: Iterable[str], spans: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, tuple[int, int, int]], int]:
    """Return each tensor's offset and size in the file, its place on the device, and the sum."""
    places, total = {}, 0
    for name in names:
        if name not in spans:
            raise OutdatedEngineError(
                f"tensor {name} is not in {WEIGHTS_FILE}, but a role names it"
            )
        offset, size = spans[name]
        places[name] = (offset, size, total)
        total += -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
    return places, total


@cache
def _process_gpu() -> Gpu:
    return open_gpu()
