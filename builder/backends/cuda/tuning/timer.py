"""Times the candidates of a shape on this machine's GPU, and compares what they compute."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias
from zlib import crc32

import numpy as np

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler
from specbuild.builder.backends.cuda.plan.memory_plan import aligned
from specbuild.builder.backends.cuda.tuning.inputs import LaunchData, contexts_for
from specbuild.builder.backends.cuda.tuning.op_runner import OpRunner
from specbuild.plugins_cuda.launches import Lowering, LoweringRequest
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.runtime.errors import UnsupportedHereError

# All copies together, so that L2 holds nothing of a launch when its turn comes again.
ROTATED_BYTES = 600 << 20
FEWEST_COPIES, MOST_LAUNCHES = 3, 40
# One replay of a graph of launches, and all replays of one candidate.
REPLAY_S, CANDIDATE_S = 0.02, 0.1
FEWEST_REPLAYS, MOST_REPLAYS = 5, 12
# Results of prompt chunks may differ by the rounding of another order of sums, no more.
PREFILL_TOLERANCE = 2**-5
_POISON = 0xFF
# Inputs of no weight type that are constants of a layer all the same.
_CONSTANT = ("cos", "sin", "sinks")


@dataclass(frozen=True)
class Measured:
    """A candidate: median microseconds of a call in each setting, and whether it is right.

    One that cannot be launched takes forever.
    """

    us: tuple[float, ...]
    agrees: bool


class CandidateTimer(Protocol):
    """What ``tune`` needs of a GPU."""

    @property
    def device(self) -> str:
        """The GPU as its driver names it."""
        ...

    def measure(
        self, op: OpSpec, request: LoweringRequest, lowerings: Sequence[Lowering]
    ) -> list[Measured]:
        """Times lowerings of one request, the default first, which the others must agree with."""
        ...

    def close(self) -> None:
        """Gives the device's memory back."""
        ...


Place: TypeAlias = dict[str, int]


@dataclass(frozen=True)
class Block:
    """One allocation and the tensors in it."""

    pointer: int
    place: Place


@dataclass(frozen=True)
class Copies:
    """Places of the tensors, weights apart: those stay. ``results`` are outputs before a launch.

    An output that is written in place stands under its input's name.
    """

    weights: list[Block]
    varying: list[Block]
    results: dict[str, np.ndarray]


class GpuTimer:
    """The first GPU. ``context`` is how many tokens a sequence holds.

    Weights stay on the device while requests name the same ones, as those of a layer do.
    """

    def __init__(self, compiler: Compiler, context: int) -> None:
        self._runner = OpRunner(compiler)
        self._context = context
        self._weights: list[Block] = []
        self._weights_key = ""

    @property
    def device(self) -> str:
        """The GPU as its driver names it."""
        return self._runner.device_name

    def measure(
        self, op: OpSpec, request: LoweringRequest, lowerings: Sequence[Lowering]
    ) -> list[Measured]:
        """See :class:`CandidateTimer`."""
        settings = [
            self._in_setting(op, request, lowerings, context)
            for context in contexts_for(request, self._context)
        ]
        return [
            Measured(tuple(s[i].us[0] for s in settings), all(s[i].agrees for s in settings))
            for i in range(len(lowerings))
        ]

    def close(self) -> None:
        """Gives the device's memory back."""
        self._free(self._weights)
        self._weights, self._weights_key = [], ""

    def _in_setting(
        self, op: OpSpec, request: LoweringRequest, lowerings: Sequence[Lowering], context: int
    ) -> list[Measured]:
        copies = self._copies(op, request, context)
        try:
            first = [self._timed(lowerings[0], copies)]
            first += [self._tried(lowering, copies) for lowering in lowerings[1:]]
            # Again in the other order: a clock that drifts would favour one end of the list.
            second = [self._tried(lowering, copies)[0] for lowering in reversed(lowerings)]
        finally:
            self._free(copies.varying)
        wanted = first[0][1]
        return [
            Measured(((us + again) / 2,), _agree(request, wanted, found))
            for (us, found), again in zip(first, reversed(second), strict=True)
        ]

    def _copies(self, op: OpSpec, request: LoweringRequest, context: int) -> Copies:
        inputs = [spec for spec in op.inputs if spec.name in request.tensors]
        fixed = [spec.name for spec in inputs if spec.dtype == "W" or spec.name in _CONSTANT]
        drawn = [spec.name for spec in inputs if spec.name not in fixed]
        aliased = dict(op.aliases)
        outputs = {
            spec.name: np.full(request.tensors[spec.name].nbytes, _POISON, np.uint8)
            for spec in op.outputs
            if spec.name in request.tensors and spec.name not in aliased
        }
        seed = crc32(op.name.encode())
        first = LaunchData(request, context, np.random.default_rng(seed))
        arrays = first.arrays(drawn)
        one = sum(request.tensors[name].nbytes for name in fixed)
        one += sum(array.nbytes for array in arrays.values())
        count = max(FEWEST_COPIES, min(MOST_LAUNCHES, -(-ROTATED_BYTES // max(one, 1))))
        self._keep_weights(first, fixed, count)
        results = outputs | {name: arrays[name] for name in aliased.values() if name in arrays}
        nbytes = {name: array.nbytes for name, array in outputs.items()}
        varying: list[Block] = []
        for copy in range(count):
            if copy:  # other rows choose other experts, as they do from layer to layer
                data = LaunchData(request, context, np.random.default_rng(seed + copy))
                arrays = data.arrays(drawn)
            varying.append(self._uploaded(arrays, nbytes))
        return Copies(self._weights[:count], varying, results)

    def _block(self, sizes: Mapping[str, int]) -> Block:
        """One poisoned allocation of several tensors."""
        offsets, total = {}, 0
        for name, size in sizes.items():
            offsets[name] = total
            total += aligned(size)
        pointer = self._runner.allocate(total)
        return Block(pointer, {name: pointer + offset for name, offset in offsets.items()})

    def _uploaded(
        self, arrays: Mapping[str, np.ndarray], nbytes: Mapping[str, int] | None = None
    ) -> Block:
        sizes = {name: array.nbytes for name, array in arrays.items()}
        block = self._block(sizes | dict(nbytes or {}))
        for name, array in arrays.items():
            self._runner.upload(block.place[name], array)
        return block

    def _keep_weights(self, data: LaunchData, names: Sequence[str], count: int) -> None:
        key = repr({name: data.request.tensors[name] for name in names})
        if key != self._weights_key:
            self.close()
            self._weights_key = key
        if len(self._weights) < count:
            arrays = data.arrays(names)
            self._weights += [self._uploaded(arrays) for _ in range(count - len(self._weights))]

    def _tried(self, lowering: Lowering, copies: Copies) -> tuple[float, dict[str, np.ndarray]]:
        """As :meth:`_timed`; forever and no results where the GPU refuses the launch."""
        try:
            return self._timed(lowering, copies)
        except UnsupportedHereError:
            return math.inf, {}

    def _timed(self, lowering: Lowering, copies: Copies) -> tuple[float, dict[str, np.ndarray]]:
        """Microseconds of a call, and what the first copy holds of results."""
        runner = self._runner
        nbytes = {w.name: w.nbytes for w in lowering.workspaces}
        zeros = {w.name: np.zeros(w.nbytes, np.uint8) for w in lowering.workspaces if w.zeroed}
        workspaces = [self._block(nbytes) for _ in copies.varying]
        try:
            for block in workspaces:
                for name, array in zeros.items():
                    runner.upload(block.place[name], array)
            checked = copies.varying[0].place
            for name, before in copies.results.items():
                runner.upload(checked[name], before)
            # Launches go to a stream that waits for no copy.
            runner.synchronize()
            blocks = zip(copies.weights, copies.varying, workspaces, strict=True)
            work = [(lowering, w.place | v.place | held.place) for w, v, held in blocks]
            estimate = runner.time_s(work, replays=1) / len(work)
            launches = max(len(work), min(MOST_LAUNCHES, int(REPLAY_S / estimate)))
            replays = int(CANDIDATE_S / (estimate * launches))
            seconds = runner.time_s(
                [work[i % len(work)] for i in range(launches)],
                replays=max(FEWEST_REPLAYS, min(MOST_REPLAYS, replays)),
            )
            found = {name: runner.download(checked[name], a) for name, a in copies.results.items()}
        finally:
            self._free(workspaces)
        return seconds / launches * 1e6, found

    def _free(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._runner.free(block.pointer)


def _agree(
    request: LoweringRequest,
    wanted: Mapping[str, np.ndarray],
    found: Mapping[str, np.ndarray],
) -> bool:
    """The same bits when decoding; in a prompt chunk the same numbers but for rounding."""
    if found.keys() != wanted.keys():
        return False
    if request.phase == "decode":
        return all(wanted[name].tobytes() == found[name].tobytes() for name in wanted)
    return all(
        _close(*(_numbers(side[name], request.tensors[name].dtype) for side in (wanted, found)))
        for name in wanted
    )


def _numbers(data: np.ndarray, dtype: str) -> np.ndarray:
    """What downloaded bits or bytes stand for."""
    flat = np.ascontiguousarray(data).reshape(-1)
    if dtype == "bfloat16":
        return (flat.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return flat.view({"float32": np.float32, "int32": np.int32, "uint8": np.uint8}[dtype])


def _close(wanted: np.ndarray, found: np.ndarray) -> bool:
    if wanted.dtype != np.float32:
        return bool(np.array_equal(wanted, found))
    if not (np.isfinite(wanted).all() and np.isfinite(found).all()):
        return False
    largest = float(np.abs(wanted).max(initial=0.0))
    return float(np.abs(wanted - found).max(initial=0.0)) <= PREFILL_TOLERANCE * largest
