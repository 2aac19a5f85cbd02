"""Every kernel against its op's reference, in the CPU emulator, over all cases and tactics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from emulation import has_compiler, run_lowering
from plugin_cases import plugin_of, run_plugin

from specbuild.builder.backends.cuda.tuning.kernel_case import (
    SMALL_TARGET,
    KernelCase,
    bits,
    cases_for,
    kernel_case,
    kernel_ops,
    phases_of,
)
from specbuild.plugins_cuda.cases import Case
from specbuild.plugins_cuda.draft_input import lowering as draft_input
from specbuild.plugins_cuda.draft_input.cases import inputs
from specbuild.plugins_cuda.draft_input.op import OP as DRAFT_INPUT
from specbuild.plugins_cuda.launches import Lowering, Phase, Tactic
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.runtime.errors import SpecbuildError

pytestmark = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")


# Long cases that differ from their neighbours by a format, a head width or a number of tiles.
REPEATED = frozenset({
    "PagedTreeAttention: heads of 128, many rows of one sequence",
    "PagedTreeAttention: 8 heads of 128 a KV head, several rows, capacity for a long context",
    "PagedTreeAttention: heads of 128, a view per KV head, many rows",
    "PagedTreeAttention: heads of 128, prompt chunks over several tiles",
    "PagedTreeAttention: blocks, capacity for a long context",
    "PagedTreeAttention: codes, longer than the context's splits",
    "PagedTreeAttention: codes, capacity for a long context",
    "PagedTreeAttention: selected slots, lists per KV head, one sequence",
    "MlaAttention: absorbed: a chunk of more rows than a CTA projects",
    "MlaAttention: selected slots, two words",
    "MlaAttention: selected slots of a view, some rows whole",
    "Linear: 120 rows, 2880 to 144, residual",
    "RmsMoe: several tiles of one expert",
    "RmsMoe: several tiles of one expert, bf16",
    "RmsMoe: weights of several stages, an odd number of blocks",
})  # fmt: skip


def forms() -> Iterator[Any]:
    """Yield every case of every op, with its phases and its index among the op's cases."""
    for op in kernel_ops():
        cases: dict[str, tuple[Case, list[Phase]]] = {}
        for phase in phases_of(op):
            for case in cases_for(op, phase, gpu=False):
                cases.setdefault(case.name, (case, []))[1].append(phase)
        for turn, (name, (case, phases)) in enumerate(cases.items()):
            case_id = f"{op.name}: {name}"
            marks = [pytest.mark.slow] if case_id in REPEATED else []
            yield pytest.param(op, case, phases, turn, id=case_id, marks=marks)


def test_redundant_cases_exist() -> None:
    assert {form.id for form in forms()} >= REPEATED


_SEEN: set[object] = set()


def _is_new(drawn: KernelCase, lowering: Lowering) -> bool:
    """Return whether no earlier case passed the same arguments to the same entry points."""
    launches = [
        (launch.kernel.entry, *(a if isinstance(a, str) else type(a) for a in launch.arguments))
        for launch in lowering.launches
    ]
    form = (drawn.op.name, *drawn.inputs, *launches)
    seen_before = form in _SEEN
    _SEEN.add(form)
    return not seen_before


def run(drawn: KernelCase, phase: Phase, lowering: Lowering, *, as_plugin: bool = False) -> None:
    inputs = {name: bits(tensor) for name, tensor in drawn.inputs.items()}
    outputs = {name: bits(tensor) for name, tensor in drawn.outputs.items()}
    result = run_lowering(drawn.op, lowering, inputs, outputs)
    drawn.check(result)
    # A TensorRT engine has one rank.
    if as_plugin and drawn.op.contribution is None and _is_new(drawn, lowering):
        plugin = plugin_of(drawn, phase, SMALL_TARGET, lowering)
        for name, by_plugin in run_plugin(drawn, plugin, inputs, outputs).items():
            defined = drawn.case.compare.get(name, np.s_[:])
            np.testing.assert_array_equal(by_plugin[defined], result[name][defined], err_msg=name)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("op", "case", "phases", "turn"), forms())
def test_kernels_agree_with_the_reference(
    op: OpSpec, case: Case, phases: list[Phase], turn: int, every: bool
) -> None:
    """Compare a TensorRT plugin with these launches, too: it gives the same bits.

    If a phase has its own kernels, every phase is tested; otherwise the cases alternate between
    phases.
    """
    drawn = kernel_case(op, case)
    lowerings: list[tuple[Phase, Lowering]] = []
    for phase in phases:
        try:
            lowerings.append((phase, drawn.lowering(phase, SMALL_TARGET)))
        except SpecbuildError as refusal:
            reason = f"the kernels refuse it: {refusal}"
    if not lowerings:
        pytest.skip(reason)
    for phase, lowering in lowerings if every else [lowerings[turn % len(lowerings)]]:
        run(drawn, phase, lowering, as_plugin=True)


@pytest.mark.slow
@pytest.mark.parametrize("op", kernel_ops(), ids=lambda op: op.name)
def test_tactics_agree_with_the_reference(op: OpSpec) -> None:
    """Test each tactic with the last of the cases that it is proposed for."""
    if op.tactics is None:
        pytest.skip("the op has one form only")
    for phase in phases_of(op):
        tried: list[Tactic] = []
        for case in reversed(cases_for(op, phase, gpu=False)):
            drawn = kernel_case(op, case)
            try:
                drawn.lowering(phase, SMALL_TARGET)
            except SpecbuildError:
                continue
            tactics = list(op.tactics(drawn.request(phase, SMALL_TARGET)))
            for tactic in tactics:
                if tactic in tried:
                    continue
                tried.append(tactic)
                run(drawn, phase, drawn.lowering(phase, SMALL_TARGET, tactic))
        assert tried


@pytest.mark.parametrize(
    "case",
    [
        inputs(9, 296),
        inputs(10, 288, packed=True, rounding="offset"),
        inputs(17, 1312, embedding=False, segments=3),
        inputs(11, 264, embedding=False, rounding="gpt_oss", residual=True, factor=True),
    ],
    ids=lambda case: case.name,
)
def test_prompts_have_the_bits_of_steps(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """DraftInput has another kernel for many rows."""
    drawn = kernel_case(DRAFT_INPUT, case)
    arrays = {name: bits(tensor) for name, tensor in drawn.inputs.items()}
    blank = {name: np.zeros_like(bits(tensor)) for name, tensor in drawn.outputs.items()}
    results: dict[str, np.ndarray] = {}
    for fewest in (1, 1000):
        monkeypatch.setattr(draft_input, "_MANY_ROWS", fewest)
        lowered = drawn.lowering("decode", SMALL_TARGET)
        [launch] = lowered.launches
        results[launch.kernel.entry] = run_lowering(DRAFT_INPUT, lowered, arrays, blank)["u"]
    assert set(results) == {"draft_input_of_many", "draft_input"}
    np.testing.assert_array_equal(*results.values())
    assert results["draft_input"].any()
