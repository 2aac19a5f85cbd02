"""The launches of a step from its plan: their bytes, layers and dependencies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_draft, write_target
from deepseek_checkpoints import write_deepseek
from llama_checkpoints import write_llama
from plan_host import lowered_engine

from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.backends.cuda.plan.plan_writer import program_bytes
from specbuild.runtime.engine_dir.plan import (
    ITEM_BYTES,
    Binding,
    CompiledKernel,
    Plan,
    Program,
    ProgramEntry,
)
from specbuild.runtime.executors.cuda.program_file import read_program
from specbuild.runtime.measure.anatomy import LaunchAnatomy, StepAnatomy, step_anatomy
from specbuild.runtime.measure.byte_floor import Work, pass_traffic
from specbuild.runtime.measure.launch_needs import launch_needs

LAYERS, EXPERTS, CHOSEN, CONTEXT = 6, 4, 2, 40
SIZES = {"hidden": 96, "q_heads": 6, "kv_heads": 2, "head_dim": 32}


@dataclass(frozen=True)
class Lowered:
    """An engine with uncompiled kernels, and its step programs by name."""

    engine: LoweredEngine
    plan: Plan
    programs: dict[str, tuple[ProgramEntry, Program]]

    def step(self, name: str, **work: float) -> StepAnatomy:
        entry, program = self.programs[name]
        nodes = entry.draft_tokens + 1
        asked = Work(entry.batch * nodes, entry.batch, CONTEXT, **work)
        return step_anatomy(self.plan, entry, program, asked, draft="some")

    def stored(self, pattern: str) -> int:
        """Return the bytes of all stored tensors with such names."""
        weights = self.engine.weights.items()
        return sum(recipe.nbytes for name, recipe in weights if re.search(pattern, name))


def _lowered(target: Path, draft: Path | None, **options: int) -> Lowered:
    engine = lowered_engine(target, draft, max_seq_len=64, max_batch_size=2, **options)
    unbuilt = {
        k: CompiledKernel(f"{k.folder}/{k.file}:{k.entry}", "", k.entry, 0, 0, 0)
        for k in engine.writer.kernels
    }
    entries = [entry for entry, _ in engine.programs]
    plan = engine.writer.plan(engine.target, 0, unbuilt, entries)
    programs = {
        entry.name: (entry, read_program(program_bytes(engine.writer.program(lowered)), entry))
        for entry, lowered in engine.programs
        if entry.kind == "step"
    }
    return Lowered(engine, plan, programs)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    path = tmp_path_factory.mktemp("gpt-oss")
    write_target(path / "t", layers=LAYERS, experts=EXPERTS, experts_per_token=CHOSEN, **SIZES)
    write_draft(path / "d", target_layers=LAYERS, target_hidden=96, inner=64, **SIZES)
    tree = {"draft_top_k": 1, "draft_depth": 3, "draft_tokens": 3}
    return _lowered(path / "t", path / "d", **tree)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    """A separate launch norms the heads; it reads the tables of rotations."""
    path = tmp_path_factory.mktemp("qwen3") / "t"
    write_llama(path, "qwen3", dtype="bfloat16", head_dim=32)
    return _lowered(path, None)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    """A dense layer, and a layer with a shared expert and routed experts."""
    path = tmp_path_factory.mktemp("deepseek") / "t"
    widths = {"moe_intermediate_size": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    write_deepseek(path, n_shared_experts=1, q_lora_rank=32, kv_lora_rank=64, **widths)
    return _lowered(path, None)


def by_kernel(step: StepAnatomy, entry: str, layer: int | None) -> list[LaunchAnatomy]:
    return [
        launch
        for launch in step.launches
        if launch.layer == layer and launch.kernel.endswith(f":{entry}")
    ]


@pytest.mark.parametrize("name", ["step@1", "step@2", "step@1.draft-1-3-3", "step@1.extends"])
def test_launches_read_the_bytes_of_their_ops(gpt_oss: Lowered, name: str) -> None:
    step = gpt_oss.step(name, experts=3)
    entry, program = gpt_oss.programs[name]
    total = 0.0
    for call in program.ops:
        rows = entry.batch * (entry.draft_tokens + 1 if call.section == "target" else 1)
        experts = 3 if call.section == "target" else 0
        work = Work(rows, entry.batch, CONTEXT, experts=experts)
        total += pass_traffic([call]).bytes_read(work).total
    assert step.bytes_read == pytest.approx(total)
    assert min(launch.bytes_read for launch in step.launches) >= 0
    assert (step.experts, step.experts_measured) == (3, True)


def test_bytes_of_an_op_are_assigned_to_the_launches_that_read_them(gpt_oss: Lowered) -> None:
    """By the names of stored tensors: three launches of the experts, and their sum."""
    step, layer = gpt_oss.step("step@1"), r"layers\.1\."
    [route] = by_kernel(step, "route_rows", 1)
    [gate_up] = by_kernel(step, "gate_up_experts", 1)
    [down] = by_kernel(step, "down_experts", 1)
    chosen = CHOSEN / EXPERTS
    assert (step.experts, step.experts_measured) == (CHOSEN, False)
    assert route.bytes_read == gpt_oss.stored(layer + r"(mlp\.router|post_attention)")
    assert gate_up.bytes_read == chosen * gpt_oss.stored(layer + r"mlp\.experts\.gate_up")
    assert down.bytes_read == chosen * gpt_oss.stored(layer + r"mlp\.experts\.down")
    assert [x.bytes_read for x in by_kernel(step, "add_experts", 1)] == [0]


def test_shared_experts_are_read_in_addition_to_selected_ones(deepseek: Lowered) -> None:
    step, layer = deepseek.step("step@1"), r"layers\.1\."
    [route] = by_kernel(step, "route_with_parts", 1)
    [gate_up] = by_kernel(step, "gate_up_experts", 1)
    [down] = by_kernel(step, "down_experts", 1)
    chosen, experts = 3, 8
    read = (chosen + 1) / (experts + 1)
    assert gate_up.bytes_read == read * deepseek.stored(layer + r"mlp\.experts\.gate_up")
    assert down.bytes_read == read * deepseek.stored(layer + r"mlp\.experts\.down")
    assert route.bytes_read == deepseek.stored(layer + r"(mlp\.gate\.|post_attention)")


def test_lookup_tables_do_not_count_as_weights(qwen3: Lowered) -> None:
    """The tables are as large as this model's weights, and another launch has them as arguments."""
    step, layer = qwen3.step("step@1"), r"layers\.2\."
    launches = [x for x in step.launches if x.layer == 2 and x.op == "RmsQkvRope"]
    product, heads = launches
    tables = qwen3.stored("rope")
    weight = qwen3.stored(layer + r"(self_attn\.qkv_proj|input_layernorm)")
    norms = qwen3.stored(layer + r"self_attn\.[qk]_norm")
    assert tables > weight > norms > 0
    a_row = 2 * 16 * 4  # cos and sin of half a head, fp32
    # Both launches have the tables as arguments, and share the row.
    assert product.bytes_read == weight + a_row / 2
    assert heads.bytes_read == norms + a_row / 2


def test_layers_are_derived_from_weight_names(gpt_oss: Lowered) -> None:
    step = gpt_oss.step("step@1.draft-1-3-3")
    for launch in step.launches:
        if (
            launch.section != "target"
            or launch.op in ("VerifyInputs", "Embed", "Capture")
            or launch.kernel.startswith("head_choose")
        ):
            assert launch.layer is None
    layered = [launch.layer for launch in step.launches if launch.layer is not None]
    assert layered == sorted(layered)
    assert [layered.count(layer) for layer in range(LAYERS)] == [len(layered) // LAYERS] * LAYERS
    attending = [x.layer for x in step.launches if x.op == "PagedTreeAttention"]
    assert attending == [None] * 3 + [*range(LAYERS)]


class Owners:
    """The last writer of every byte, as the index of an op in the program; −1 is none."""

    def __init__(self, plan: Plan, program: Program) -> None:
        self._bytes = [np.full(b.bytes, -1) for b in plan.buffers if b.space != "weights"]
        places = [i for i, b in enumerate(plan.buffers) if b.space != "weights"]
        self._place = {buffer: place for place, buffer in enumerate(places)}
        arena = next(i for i, b in enumerate(plan.buffers) if b.space == "arena")
        self._arena, self._lifetimes = self._bytes[self._place[arena]], program.lifetimes

    def reads(self, op: int, inputs: dict[str, Binding]) -> set[int]:
        """Return the writers of the data that the op reads. New buffers have no writer."""
        for life in self._lifetimes:
            if life.first == op:
                self._arena[life.offset : life.offset + life.bytes] = -1
        seen: set[int] = set()
        for binding in inputs.values():
            if binding.buffer in self._place:
                seen |= {int(owner) for owner in np.unique(self._of(binding)) if owner >= 0}
        return seen

    def writes(self, op: int, outputs: dict[str, Binding]) -> None:
        for binding in outputs.values():
            self._of(binding)[:] = op

    def _of(self, binding: Binding) -> np.ndarray:
        end = binding.offset + ITEM_BYTES[binding.dtype] * int(np.prod(binding.shape))
        return self._bytes[self._place[binding.buffer]][binding.offset : end]


@pytest.mark.parametrize("name", ["step@2", "step@1.draft-1-3-3"])
def test_a_launch_depends_on_the_writers_of_its_inputs(gpt_oss: Lowered, name: str) -> None:
    """Compare the dependencies between ops with the owner of every byte."""
    _, program = gpt_oss.programs[name]
    needs = launch_needs(gpt_oss.plan, program)
    owners = Owners(gpt_oss.plan, program)
    found: dict[int, set[int]] = {op: set() for op in range(len(program.ops))}
    for launch, needed in zip(program.launches, needs, strict=True):
        found[launch.op] |= {program.launches[i].op for i in needed} - {launch.op}
    waiting = 0
    for op, call in enumerate(program.ops):
        expected = owners.reads(op, call.inputs)
        assert found[op] <= expected, (op, call.op)
        if expected:
            assert max(found[op]) == max(expected), (op, call.op)
            waiting += 1
        owners.writes(op, call.outputs)
    assert waiting > len(program.ops) - 4
    for place, needed in enumerate(needs):
        assert all(0 <= i < place for i in needed)


def test_launches_of_an_op_depend_on_each_other(gpt_oss: Lowered) -> None:
    step = gpt_oss.step("step@1")
    for place, launch in enumerate(step.launches):
        if launch.kernel.rpartition(":")[2] in ("gate_up_experts", "down_experts", "add_experts"):
            assert max(launch.needs) == place - 1
    # Attention and the experts' sum are far apart: the residual comes from behind attention.
    place = next(i for i, x in enumerate(step.launches) if x.kernel.endswith(":add_experts"))
    residual = next(
        i for i, x in enumerate(step.launches) if x.kernel.endswith("/kernel.cu:linear")
    )
    assert residual in step.launches[place].needs
