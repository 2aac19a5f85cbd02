"""Queues the launches of a plugin's op: plain addresses and a stream, without TensorRT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.cuda.gpu import Gpu, Handle
from specbuild.runtime.executors.cuda.programs import (
    KernelLibrary,
    PackedProgram,
    RankAddresses,
)
from specbuild.runtime.executors.tensorrt.plugin_record import PluginRecord, workspace_places

# Recent placements of tensors: each context has its own and reuses them.
_MAX_PACKED = 256
_Fill = tuple[int, int]


class OpLauncher:
    """One op on one GPU. Nodes of a graph that have the same fields share it.

    A cubin is loaded at the first use of one of its kernels by a bucket.
    """

    def __init__(self, gpu: Gpu, record: PluginRecord, cubins: Mapping[str, bytes]) -> None:
        self.record = record
        self._gpu = gpu
        self._kernels = KernelLibrary(gpu, record.kernels, cubins.__getitem__)
        self._packed: dict[tuple[int, ...], tuple[tuple[_Fill, ...], PackedProgram]] = {}

    def prepare(self, bucket: int, tactic: int = 0) -> None:
        """Load the kernels, which is not possible while a graph is recorded."""
        for launch in self.record.buckets[bucket].tactics[tactic].launches:
            self._kernels.function(launch.kernel, launch.shared_bytes, launch.block)

    def enqueue(
        self,
        bucket: int,
        tensors: Sequence[int],
        workspace: int,
        stream: Handle,
        *,
        tactic: int = 0,
    ) -> None:
        """Queue the launches, on a stream that runs or records.

        ``tensors`` are the addresses of the inputs, then of the outputs; ``workspace`` is that of
        ``record.workspace_bytes`` of scratch memory. Raises SpecbuildError if an output that
        aliases its input has another address.
        """
        key = (bucket, tactic, workspace, *tensors)
        if key not in self._packed:
            if len(self._packed) == _MAX_PACKED:
                self._packed.clear()
            self._packed[key] = self._pack(bucket, tactic, tensors, workspace)
        fills, program = self._packed[key]
        for address, words in fills:
            self._gpu.fill(address, 0, words, stream)
        for config in program.launches:
            self._gpu.launch(config, stream)

    def _pack(
        self, bucket: int, tactic: int, tensors: Sequence[int], workspace: int
    ) -> tuple[tuple[_Fill, ...], PackedProgram]:
        self._require_aliases(tensors)
        chosen = self.record.buckets[bucket].tactics[tactic]
        places = [workspace + place for place in workspace_places(chosen.workspaces)[:-1]]
        fills = tuple(
            (place, -(-scratch.bytes // 4))
            for place, scratch in zip(places, chosen.workspaces, strict=True)
            if scratch.zeroed and scratch.bytes
        )
        return fills, PackedProgram(
            chosen.launches, RankAddresses([*tensors, *places]), self._kernels
        )

    def _require_aliases(self, tensors: Sequence[int]) -> None:
        record = self.record
        for index, output in enumerate(record.outputs, start=len(record.inputs)):
            if output.alias is not None and tensors[index] != tensors[output.alias]:
                raise SpecbuildError(
                    f"{record.name} writes {output.name} over {record.inputs[output.alias].name}, "
                    "but they lie apart; build with TensorRT's preview feature for aliased plugin "
                    "tensors, and bind both to one address"
                )
