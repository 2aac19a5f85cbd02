"""Times the candidates of a shape on this machine's GPU, and compares what they compute."""

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

# All copies together, so that L2 holds nothing of a launch when its turn comes again.
ROTATED_BYTES = 600 << 20
FEWEST_COPIES, MAX_LAUNCHES = 3, 40
# One replay of a graph of launches, and all replays of one candidate.
REPLAY_S, CANDIDATE_S = 0.02, 0.1
FEWEST_REPLAYS, MAX_REPLAYS = 5, 12
_POISON = 0xFF
# Inputs of no weight type that are constants of a layer all the same.
_CONSTANT = ("cos", "sin", "sinks")


@dataclass(frozen=True)
class Measured:
    """A candidate: median microseconds of a call in each setting, and how many values differ.

    That is from the default's results, whole or cut; one that cannot be launched takes forever,
    and has None.
    """

    us: tuple[float, ...]
    differing: int | None = 0


@dataclass(frozen=True)
class Candidate:
    """A tactic's launches: of a whole request, and of the pieces of every cut of it."""

    whole: Lowering
    cuts: tuple[tuple[Lowering, ...], ...] = ()


class CandidateTimer(Protocol):
    """What ``tune`` needs of a GPU."""

    @property
    def device(self) -> str:
        """The GPU as its driver names it."""
        ...

    def measure(
        self, op: OpSpec, request: LoweringRequest, candidates: Sequence[Candidate]
    ) -> list[Measured]:
        """Times candidates of one request, the default first, which all must agree with."""
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
        self, op: OpSpec, request: LoweringRequest, candidates: Sequence[Candidate]
    ) -> list[Measured]:
        """See :class:`CandidateTimer`."""
        settings = [
            self._in_setting(op, request, candidates, context)
            for context in contexts_for(request, self._context)
        ]
        return [
            Measured(tuple(s.us[0] for s in each), _sum([s.differing for s in each]))
            for each in zip(*settings, strict=True)
        ]

    def close(self) -> None:
        """Gives the device's memory back."""
        self._free(self._weights)
        self._weights, self._weights_key = [], ""

    def _in_setting(
        self, op: OpSpec, request: LoweringRequest, candidates: Sequence[Candidate], context: int
    ) -> list[Measured]:
        copies = self._copies(op, request, context)
        lowerings = [candidate.whole for candidate in candidates]
        try:
            first = [self._timed(lowerings[0], copies)]
            first += [self._tried(lowering, copies) for lowering in lowerings[1:]]
            # Again in the other order: a clock that drifts would favour one end of the list.
            second = [self._tried(lowering, copies)[0] for lowering in reversed(lowerings)]
            cuts = [self._cut(op, request, candidate, copies) for candidate in candidates]
        finally:
            self._free(copies.varying)
        nbytes = {name: ITEM_BYTES[request.tensors[name].dtype] for name in copies.results}

        def differing(found: Sequence[dict[str, np.ndarray]]) -> int | None:
            return _sum([differing_values(first[0][1], some, nbytes) for some in found])

        return [
            Measured(((us + again) / 2,), differing([found, *of_cuts]))
            for (us, found), again, of_cuts in zip(first, reversed(second), cuts, strict=True)
        ]

    def _cut(
        self, op: OpSpec, request: LoweringRequest, candidate: Candidate, copies: Copies
    ) -> list[dict[str, np.ndarray]]:
        """The results of every cut; none of one that the GPU refuses."""
        found = []
        for cut, lowerings in zip(cuts_of(op, request), candidate.cuts, strict=False):
            try:
                found.append(self._in_pieces(op, request, cut, lowerings, copies))
            except UnsupportedHereError:
                found.append({})
        return found

    def _in_pieces(
        self,
        op: OpSpec,
        request: LoweringRequest,
        cut: Cut,
        lowerings: Sequence[Lowering],
        copies: Copies,
    ) -> dict[str, np.ndarray]:
        """What the first copy holds of results after launches of a part of its rows each."""
        runner, place = self._runner, copies.weights[0].place | copies.varying[0].place
        for name, before in copies.results.items():
            runner.upload(place[name], before)
        starts = LaunchData(request, self._context, np.random.default_rng(0)).row_start
        for piece, lowering in zip(cut, lowerings, strict=True):
            own = dict(place)
            for name in row_tensors(op, request):
                info = request.tensors[name]
                own[name] += piece.first * (info.nbytes // info.shape[0])
            blocks = [self._uploaded({"row_start": row_starts(starts, piece)})]
            blocks.append(self._workspaces(lowering))
            for block in blocks:
                own |= block.place
            try:
                runner.prepare([lowering])
                runner.synchronize()
                runner.launch(lowering, own, programmatic=False)
                runner.synchronize()
            finally:
                self._free(blocks)
        return {name: runner.download(place[name], a) for name, a in copies.results.items()}

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
        count = max(FEWEST_COPIES, min(MAX_LAUNCHES, -(-ROTATED_BYTES // max(one, 1))))
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

    def _workspaces(self, lowering: Lowering) -> Block:
        """Poisoned, and zeros where a launch expects them."""
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
        workspaces = [self._workspaces(lowering) for _ in copies.varying]
        try:
            checked = copies.varying[0].place
            for name, before in copies.results.items():
                runner.upload(checked[name], before)
            # Launches go to a stream that waits for no copy.
            runner.synchronize()
            blocks = zip(copies.weights, copies.varying, workspaces, strict=True)
            work = [(lowering, w.place | v.place | held.place) for w, v, held in blocks]
            estimate = runner.time_s(work, replays=1) / len(work)
            launches = max(len(work), min(MAX_LAUNCHES, int(REPLAY_S / estimate)))
            replays = int(CANDIDATE_S / (estimate * launches))
            seconds = runner.time_s(
                [work[i % len(work)] for i in range(launches)],
                replays=max(FEWEST_REPLAYS, min(MAX_REPLAYS, replays)),
            )
            found = {name: runner.download(checked[name], a) for name, a in copies.results.items()}
        finally:
            self._free(workspaces)
        return seconds / launches * 1e6, found

    def _free(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._runner.free(block.pointer)


def _sum(counts: Sequence[int | None]) -> int | None:
    """None where something was not computed."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def differing_values(
    wanted: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], nbytes: Mapping[str, int]
) -> int | None:
    """How many values differ in a bit, of outputs by name; None where ``found`` lacks outputs.

    A value of an output has ``nbytes``. A NaN equals itself, and no zero another of other sign.
    """
    if found.keys() != wanted.keys():
        return None
    return sum(_differing(wanted[name], found[name], nbytes[name]) for name in wanted)


def _differing(wanted: np.ndarray, found: np.ndarray, nbytes: int) -> int:
    one, other = (np.frombuffer(a.tobytes(), np.uint8).reshape(-1, nbytes) for a in (wanted, found))
    return int((one != other).any(axis=1).sum())
