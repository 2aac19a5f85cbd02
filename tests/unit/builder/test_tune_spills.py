"""``tune`` with a shape whose default kernel spills registers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler, Spills
from specbuild.builder.backends.cuda.tactics.tactic_file import TacticEntry
from specbuild.builder.backends.cuda.tuning.choice import Shape, measure_all
from specbuild.builder.backends.cuda.tuning.timer import Candidate, Measurement
from specbuild.builder.progress import SilentProgress
from specbuild.plugins_cuda.launches import Kernel, LoweringRequest, Target, TensorInfo
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.errors import SpecbuildError

OP = op_named("Linear")
REQUEST = LoweringRequest(
    {"x": TensorInfo((1, 4096), "bfloat16"), "weight": TensorInfo((256, 64, 1056), "uint8")},
    OP.complete({}),
    "decode",
    Target(),
)


class AllAlike:
    """A GPU on which all candidates have the same speed."""

    device = "NVIDIA H200"

    def close(self) -> None:
        """Release nothing."""

    def measure(
        self, _op: OpSpec, _request: LoweringRequest, candidates: Sequence[Candidate]
    ) -> list[Measurement]:
        return [Measurement((7.0,)) for _ in candidates]


def entry_where(monkeypatch: pytest.MonkeyPatch, spilling: Collection[Kernel]) -> TacticEntry:
    def compiled(_: Compiler, kernels: Sequence[Kernel], *__: object) -> Spills | None:
        result = frozenset(kernels) & frozenset(spilling)
        return Spills("it spills", result) if result else None

    monkeypatch.setattr(Compiler, "compile", compiled)
    monkeypatch.setattr(Compiler, "missing", lambda *_: ())
    shape, timer = Shape(OP, (REQUEST,)), AllAlike()
    (entry,), _ = measure_all([shape], Compiler("sm_90a"), timer, SilentProgress(), float("inf"))
    return entry


def kernels_of(tactic: dict[str, int]) -> set[Kernel]:
    assert OP.lower is not None
    request = LoweringRequest(
        REQUEST.tensors, REQUEST.attributes, REQUEST.phase, REQUEST.target, tactic
    )
    return {launch.kernel for launch in OP.lower(request).launches}


def test_a_default_that_spills_is_replaced_as_in_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    assert OP.tactics is not None
    second = dict(OP.tactics(REQUEST)[1])
    assert entry_where(monkeypatch, ()).tactic == {}
    assert entry_where(monkeypatch, kernels_of({}) - kernels_of(second)).tactic == second


def test_rejects_a_shape_all_of_whose_kernels_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    assert OP.tactics is not None
    every = {kernel for tactic in OP.tactics(REQUEST) for kernel in kernels_of(dict(tactic))}
    with pytest.raises(SpecbuildError, match="it spills"):
        entry_where(monkeypatch, every)
