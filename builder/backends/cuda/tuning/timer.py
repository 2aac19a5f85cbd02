"""Times the candidates of a shape on the installed GPU, and compares their results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias
from zlib import crc32

import numpy as np

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler
from specbuild.builder.backends.cuda.plan.memory_placement import aligned
from specbuild.builder.backends.cuda.tuning.inputs import LaunchData, contexts_for
from specbuild.builder.backends.cuda.tuning.op_runner import OpRunner
from specbuild.builder.backends.cuda.tuning.prompt_cuts import (
    Cut,
    cuts_of,
    row_starts,
    row_tensors,
)
from specbuild.plugins_cuda.launches import Lowering, LoweringRequest
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.runtime.engine_dir.plan import ITEM_BYTES
from specbuild.runtime.errors import UnsupportedHereError

# The size of all copies, chosen so that L2 does not contain a launch's data when its copy repeats.
ROTATED_BYTES = 600 << 20
MIN_COPIES, MAX_LAUNCHES = 3, 40
# The time of one replay of a graph of launches, and of all replays of one candidate.
REPLAY_S, CANDIDATE_S = 0.02, 0.1
MIN_REPLAYS, MAX_REPLAYS = 5, 12
_POISON = 0xFF
# Inputs that are constants of a layer although their type is not that of weights.
_CONSTANT = ("cos", "sin", "sinks")


@dataclass(frozen=True)
class Measurement:
    """The measurement of a candidate: median microseconds in each setting, and differing values.

    ``differing`` counts values that differ from the default's, full or cut. A candidate that cannot
    be launched has infinite times and None.
    """

    us: tuple[float, ...]
    differing: int | None = 0


@dataclass(frozen=True)
class Candidate:
    """A tactic's lowerings: of the full request, and of the pieces of every cut."""

    full: Lowering
    cuts: tuple[tuple[Lowering, ...], ...] = ()


class CandidateTimer(Protocol):
    """The interface of the GPU for ``tune``."""

    @property
    def device(self) -> str:
        """The GPU's name from its driver."""
        ...

    def measure(
        self, op: OpSpec, request: LoweringRequest, candidates: Sequence[Candidate]
    ) -> list[Measurement]:
        """Time candidates of one request and compare them with the first, the default."""
        ...

    def close(self) -> None:
        """Free the device's memory."""
        ...


Place: TypeAlias = dict[str, int]


@dataclass(frozen=True)
class Block:
    """One allocation and the pointers of its tensors."""

    pointer: int
    place: Place


@dataclass(frozen=True)
class Copies:
    """Pointers of the tensors, with weights separate because they are reused.

    ``results`` has the contents of outputs before a launch. An output that is written in place has
    the name of its input.
    """

    weights: list[Block]
    varying: list[Block]
    results: dict[str, np.ndarray]


class GpuTimer:
    """Times on the first GPU. ``context`` is the number of tokens per sequence.

    Weights stay on the device for consecutive requests with the same weights, as in one layer.
    """

    def __init__(self, compiler: Compiler, context: int) -> None:
        self._runner = OpRunner(compiler)
        self._context = context
        self._weights: list[Block] = []
        self._weights_key = ""

    @property
    def device(self) -> str:
        """The GPU's name from its driver."""
        return self._runner.device_name

    def measure(
        self, op: OpSpec, request: LoweringRequest, candidates: Sequence[Candidate]
    ) -> list[Measurement]:
        """See :class:`CandidateTimer`."""
        settings = [
            self._measure_setting(op, request, candidates, context)
            for context in contexts_for(request, self._context)
        ]
        return [
            Measurement(
                tuple(s.us[0] for s in per_setting), _sum([s.differing for s in per_setting])
            )
            for per_setting in zip(*settings, strict=True)
        ]

    def close(self) -> None:
        """Free the device's memory."""
        self._free(self._weights)
        self._weights, self._weights_key = [], ""

    def _measure_setting(
        self, op: OpSpec, request: LoweringRequest, candidates: Sequence[Candidate], context: int
    ) -> list[Measurement]:
        copies = self._copies(op, request, context)
        lowerings = [candidate.full for candidate in candidates]
        try:
            first = [self._time(lowerings[0], copies)]
            first += [self._try_timing(lowering, copies) for lowering in lowerings[1:]]
            # Time again in reverse order, because a drifting clock would favor one end of the list.
            second = [self._try_timing(lowering, copies)[0] for lowering in reversed(lowerings)]
            cuts = [self._run_cuts(op, request, candidate, copies) for candidate in candidates]
        finally:
            self._free(copies.varying)
        nbytes = {name: ITEM_BYTES[request.tensors[name].dtype] for name in copies.results}

        def differing(results: Sequence[dict[str, np.ndarray]]) -> int | None:
            return _sum([differing_values(first[0][1], result, nbytes) for result in results])

        return [
            Measurement(((us + second_us) / 2,), differing([results, *cut_results]))
            for (us, results), second_us, cut_results in zip(
                first, reversed(second), cuts, strict=True
            )
        ]

    def _run_cuts(
        self, op: OpSpec, request: LoweringRequest, candidate: Candidate, copies: Copies
    ) -> list[dict[str, np.ndarray]]:
        """Run every cut and return the results, empty for a cut that the GPU refuses."""
        results = []
        for cut, lowerings in zip(cuts_of(op, request), candidate.cuts, strict=False):
            try:
                results.append(self._run_pieces(op, request, cut, lowerings, copies))
            except UnsupportedHereError:
                results.append({})
        return results

    def _run_pieces(
        self,
        op: OpSpec,
        request: LoweringRequest,
        cut: Cut,
        lowerings: Sequence[Lowering],
        copies: Copies,
    ) -> dict[str, np.ndarray]:
        """Return the results in the first copy after launches of one piece each."""
        runner, pointers_of_full = self._runner, copies.weights[0].place | copies.varying[0].place
        for name, before in copies.results.items():
            runner.upload(pointers_of_full[name], before)
        starts = LaunchData(request, self._context, np.random.default_rng(0)).row_start
        for piece, lowering in zip(cut, lowerings, strict=True):
            pointers = dict(pointers_of_full)
            for name in row_tensors(op, request):
                info = request.tensors[name]
                pointers[name] += piece.first * (info.nbytes // info.shape[0])
            blocks = [self._upload({"row_start": row_starts(starts, piece)})]
            blocks.append(self._workspaces(lowering))
            for block in blocks:
                pointers |= block.place
            try:
                runner.prepare([lowering])
                runner.synchronize()
                runner.launch(lowering, pointers, programmatic=False)
                runner.synchronize()
            finally:
                self._free(blocks)
        return {
            name: runner.download(pointers_of_full[name], a) for name, a in copies.results.items()
        }

    def _copies(self, op: OpSpec, request: LoweringRequest, context: int) -> Copies:
        inputs = [spec for spec in op.inputs if spec.name in request.tensors]
        fixed = [spec.name for spec in inputs if spec.dtype == "W" or spec.name in _CONSTANT]
        varying_names = [spec.name for spec in inputs if spec.name not in fixed]
        aliased = dict(op.aliases)
        outputs = {
            spec.name: np.full(request.tensors[spec.name].nbytes, _POISON, np.uint8)
            for spec in op.outputs
            if spec.name in request.tensors and spec.name not in aliased
        }
        seed = crc32(op.name.encode())
        first = LaunchData(request, context, np.random.default_rng(seed))
        arrays = first.arrays(varying_names)
        copy_bytes = sum(request.tensors[name].nbytes for name in fixed)
        copy_bytes += sum(array.nbytes for array in arrays.values())
        count = max(MIN_COPIES, min(MAX_LAUNCHES, -(-ROTATED_BYTES // max(copy_bytes, 1))))
        self._keep_weights(first, fixed, count)
        results = outputs | {name: arrays[name] for name in aliased.values() if name in arrays}
        nbytes = {name: array.nbytes for name, array in outputs.items()}
        varying: list[Block] = []
        for copy in range(count):
            if copy:  # rows select other experts in each copy, as in different layers
                data = LaunchData(request, context, np.random.default_rng(seed + copy))
                arrays = data.arrays(varying_names)
            varying.append(self._upload(arrays, nbytes))
        return Copies(self._weights[:count], varying, results)

    def _block(self, sizes: Mapping[str, int]) -> Block:
        """Allocate several tensors at once, filled with poison bytes."""
        offsets, total = {}, 0
        for name, size in sizes.items():
            offsets[name] = total
            total += aligned(size)
        pointer = self._runner.allocate(total)
        return Block(pointer, {name: pointer + offset for name, offset in offsets.items()})

    def _upload(
        self, arrays: Mapping[str, np.ndarray], nbytes: Mapping[str, int] | None = None
    ) -> Block:
        sizes = {name: array.nbytes for name, array in arrays.items()}
        block = self._block(sizes | dict(nbytes or {}))
        for name, array in arrays.items():
            self._runner.upload(block.place[name], array)
        return block

    def _workspaces(self, lowering: Lowering) -> Block:
        """Allocate workspaces: poisoned, or zero if a launch expects it."""
        block = self._block({w.name: w.nbytes for w in lowering.workspaces})
        for workspace in lowering.workspaces:
            if workspace.zeroed:
                zeros = np.zeros(workspace.nbytes, np.uint8)
                self._runner.upload(block.place[workspace.name], zeros)
        return block

    def _keep_weights(self, data: LaunchData, names: Sequence[str], count: int) -> None:
        key = repr({name: data.request.tensors[name] for name in names})
        if key != self._weights_key:
            self.close()
            self._weights_key = key
        if len(self._weights) < count:
            arrays = data.arrays(names)
            self._weights += [self._upload(arrays) for _ in range(count - len(self._weights))]

    def _try_timing(
        self, lowering: Lowering, copies: Copies
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Like :meth:`_time`, but infinite and without results if the GPU refuses the launch."""
        try:
            return self._time(lowering, copies)
        except UnsupportedHereError:
            return math.inf, {}

    def _time(self, lowering: Lowering, copies: Copies) -> tuple[float, dict[str, np.ndarray]]:
        """Return microseconds per call, and the results in the first copy."""
        runner = self._runner
        workspaces = [self._workspaces(lowering) for _ in copies.varying]
        try:
            checked = copies.varying[0].place
            for name, before in copies.results.items():
                runner.upload(checked[name], before)
            # Launches use a stream that does not wait for copies.
            runner.synchronize()
            blocks = zip(copies.weights, copies.varying, workspaces, strict=True)
            work = [(lowering, w.place | v.place | workspace.place) for w, v, workspace in blocks]
            estimate = runner.time_s(work, replays=1) / len(work)
            launches = max(len(work), min(MAX_LAUNCHES, int(REPLAY_S / estimate)))
            replays = int(CANDIDATE_S / (estimate * launches))
            seconds = runner.time_s(
                [work[i % len(work)] for i in range(launches)],
                replays=max(MIN_REPLAYS, min(MAX_REPLAYS, replays)),
            )
            results = {
                name: runner.download(checked[name], a) for name, a in copies.results.items()
            }
        finally:
            self._free(workspaces)
        return seconds / launches * 1e6, results

    def _free(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._runner.free(block.pointer)


def _sum(counts: Sequence[int | None]) -> int | None:
    """Return the sum, or None if a count is None."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def differing_values(
    expected: Mapping[str, np.ndarray], actual: Mapping[str, np.ndarray], nbytes: Mapping[str, int]
) -> int | None:
    """Return how many values differ in any bit; None if ``actual`` lacks outputs.

    A value of an output has ``nbytes``. NaN with equal bits are equal, and zeros of different sign
    are not.
    """
    if actual.keys() != expected.keys():
        return None
    return sum(_differing(expected[name], actual[name], nbytes[name]) for name in expected)


def _differing(expected: np.ndarray, actual: np.ndarray, nbytes: int) -> int:
    one, other = (
        np.frombuffer(a.tobytes(), np.uint8).reshape(-1, nbytes) for a in (expected, actual)
    )
    return int((one != other).any(axis=1).sum())
