"""Opens a CUDA engine: its plan is checked against the GPU, then the weights stream in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from specbuild.runtime.device import Device
from specbuild.runtime.engine_dir.files import check_chunk, mapped_file, read_file
from specbuild.runtime.engine_dir.manifest import WEIGHTS_FILE, Manifest
from specbuild.runtime.engine_dir.plan import Plan
from specbuild.runtime.engine_dir.ranks import rank_weights_file
from specbuild.runtime.engine_dir.weights_file import weight_spans
from specbuild.runtime.errors import EngineFileError, OutdatedEngineError, UnsupportedHereError
from specbuild.runtime.executors.cuda.check import gpu_reasons, ranked_reasons, read_plan
from specbuild.runtime.executors.cuda.driver import open_gpu
from specbuild.runtime.executors.cuda.executor import CudaExecutor, PlacedPlan
from specbuild.runtime.executors.cuda.gpu import Gpu
from specbuild.runtime.executors.cuda.kernel_arguments import ReadFile
from specbuild.runtime.executors.cuda.plan_check import check_draft_offsets, draft_offsets
from specbuild.runtime.executors.cuda.programs import RankAddresses
from specbuild.runtime.executors.cuda.ranked import RankedExecutor
from specbuild.runtime.executors.cuda.upload import Piece, WeightsUpload
from specbuild.runtime.executors.executor import OpenedEngine


def open_engine(
    directory: Path, manifest: Manifest, here: Device, *, threads: int | None, gpus: Sequence[int]
) -> OpenedEngine:
    """Return the engine on these GPUs of this machine; raises as :func:`open_executor`."""
    del threads  # The host computes nothing.
    if manifest.ranks == 1:
        executor = open_executor(
            directory, manifest, readers=here.cores, open_device=lambda: open_gpu(gpus[0])
        )
        return OpenedEngine(executor, executor.runner.gpu.facts.name)
    ranked = open_ranked(directory, manifest, gpus, readers=here.cores)
    return OpenedEngine(ranked, f"{manifest.ranks} x {ranked.gpus[0].facts.name}")


def open_executor(
    directory: Path,
    manifest: Manifest,
    *,
    readers: int,
    open_device: Callable[[], Gpu] | None = None,
    recorded: bool = True,
    loopback: bool = False,
) -> CudaExecutor:
    """Return the engine on this machine's first GPU, or the one that ``open_device`` returns.

    ``readers`` threads load the weights. With ``recorded`` false, kernels are launched one by one.
    With ``loopback``, the first rank of an engine of several ranks runs as its own peer: its
    results are meaningless, and its times are those of a rank without the transfer between GPUs.
    Raises UnsupportedHereError before anything is loaded if it does not run here, EngineFileError
    if a file is damaged.
    """
    plan = read_plan(directory, manifest)
    if plan.ranks > 1 and not loopback:
        raise UnsupportedHereError(f"{directory} runs on {plan.ranks} GPUs, one is opened")
    gpu = (open_device or open_gpu)()

    def load(addresses: tuple[int, ...]) -> None:
        pieces = weight_pieces(directory, manifest, plan, addresses)
        _load_weights(directory, manifest, gpu, pieces, readers)
        _check_draft_offsets(directory, manifest)

    try:
        _require_fit(directory, gpu_reasons(plan, gpu))
        placed = PlacedPlan.on(gpu, plan) if plan.ranks > 1 else None
        if placed is not None:
            buffer_addresses = placed.memory.addresses
            placed = replace(
                placed,
                addresses=RankAddresses(
                    buffer_addresses, 0, (buffer_addresses,) * (plan.ranks - 1)
                ),
            )
        read = _reader(directory, manifest)
        return CudaExecutor(gpu, plan, read, load, recorded=recorded, placed=placed)
    except BaseException:
        gpu.close()
        raise


def open_ranked(
    directory: Path,
    manifest: Manifest,
    numbers: Sequence[int],
    *,
    readers: int,
    open_device: Callable[[int], Gpu] | None = None,
    recorded: bool = True,
) -> RankedExecutor:
    """Return an engine of several ranks on the given GPUs; raises as :func:`open_executor`.

    ``readers`` threads load the weights of all ranks.
    """
    plan = read_plan(directory, manifest)
    if len(numbers) != plan.ranks:
        raise UnsupportedHereError(
            f"{directory} runs on {plan.ranks} GPUs, {len(numbers)} are given; name as many, such "
            f"as cuda:{','.join(map(str, range(plan.ranks)))}"
        )
    gpus: list[Gpu] = []

    def load(rank: int, addresses: tuple[int, ...]) -> None:
        pieces = weight_pieces(directory, manifest, plan, addresses, rank)
        _load_weights(directory, manifest, gpus[rank], pieces, -(-readers // plan.ranks))
        if rank == 0:
            _check_draft_offsets(directory, manifest)

    try:
        gpus += map(open_device or open_gpu, numbers)
        _require_fit(directory, ranked_reasons(plan, gpus, numbers))
        return RankedExecutor(
            gpus, plan, _reader(directory, manifest), load, recorded=recorded, numbers=numbers
        )
    except BaseException:
        for gpu in gpus:
            gpu.close()
        raise


def _require_fit(directory: Path, reasons: Sequence[str]) -> None:
    if reasons:
        raise UnsupportedHereError(f"{directory} does not run here: {'; '.join(reasons)}")


def _reader(directory: Path, manifest: Manifest) -> ReadFile:
    """Return a function that reads a checked file of the engine."""

    def read(name: str) -> bytes:
        if name not in manifest.files:
            raise EngineFileError(
                f"{directory}: the plan names {name}, which is no part of the engine"
            )
        return bytes(read_file(directory, manifest, name))

    return read


def _load_weights(
    directory: Path,
    manifest: Manifest,
    gpu: Gpu,
    pieces: Mapping[str, Sequence[Piece]],
    readers: int,
) -> None:
    """Copy the pieces of each weights file to their places."""
    for name, of_file in pieces.items():
        check = partial(check_chunk, directory, manifest, name)
        upload = WeightsUpload(gpu, gpu.new_stream(), readers=readers, check=check)
        upload.run(directory / name, manifest.files[name], of_file)


def _check_draft_offsets(directory: Path, manifest: Manifest) -> None:
    for name in draft_offsets(manifest):
        offset, size = weight_spans(directory, manifest)[name]
        data = mapped_file(directory, manifest, WEIGHTS_FILE)[offset : offset + size]
        check_draft_offsets(name, np.frombuffer(data, np.int32), manifest)


def weight_pieces(
    directory: Path, manifest: Manifest, plan: Plan, addresses: Sequence[int], rank: int = 0
) -> dict[str, list[Piece]]:
    """Return which bytes of which weights file belong to which buffer of a rank.

    Raises EngineFileError if a buffer's tensor is missing or has another size.
    """
    buffers = [(i, buffer) for i, buffer in enumerate(plan.buffers) if buffer.space == "weights"]
    spans: dict[str, dict[str, tuple[int, int]]] = {}
    pieces: dict[str, list[Piece]] = {}
    for i, buffer in buffers:
        tensor = manifest.tensors.get(buffer.name)
        sharded = tensor is not None and tensor.sharded
        file = rank_weights_file(rank) if sharded else WEIGHTS_FILE
        if file not in spans:
            spans[file] = weight_spans(directory, manifest, file)
        offset, size = spans[file].get(buffer.name, (0, -1))
        if size != buffer.bytes:
            fault = "is missing" if size < 0 else f"has {size} bytes"
            raise OutdatedEngineError(
                f"{directory}: tensor {buffer.name} {fault}, the plan wants {buffer.bytes} bytes"
            )
        pieces.setdefault(file, []).append(Piece(offset, size, addresses[i]))
    return pieces
