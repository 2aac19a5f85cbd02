"""The traffic, sections and routers of an engine's programs, compared with its tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import write_draft, write_target
from plan_host import lowered_engine

from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.backends.cuda.plan.plan_writer import program_bytes
from specbuild.runtime.engine_dir.plan import POINTER, OpCall, Program
from specbuild.runtime.executors.cuda.program_file import read_program
from specbuild.runtime.measure.byte_floor import EngineTraffic, Work, engine_traffic
from specbuild.runtime.measure.step_timing import step_sections


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LoweredEngine:
    path = tmp_path_factory.mktemp("checkpoints")
    sizes = {"hidden": 96, "q_heads": 6, "kv_heads": 2, "head_dim": 32}
    write_target(path / "target", layers=2, experts=4, experts_per_token=2, **sizes)
    write_draft(path / "draft", target_layers=2, target_hidden=96, inner=64, **sizes)
    limits = {"draft_top_k": 1, "draft_depth": 2, "draft_tokens": 2}
    target, draft = Path(path / "target"), Path(path / "draft")
    return lowered_engine(target, draft, max_seq_len=64, max_batch_size=1, **limits)


@pytest.fixture(scope="module")
def programs(engine: LoweredEngine) -> dict[str, Program]:
    """Return the programs as a runtime reads them."""
    return {
        entry.name: read_program(program_bytes(engine.writer.program(lowered)), entry)
        for entry, lowered in engine.programs
    }


@pytest.fixture(scope="module")
def traffic(engine: LoweredEngine, programs: dict[str, Program]) -> EngineTraffic:
    entries = [entry for entry, _ in engine.programs]
    plan = engine.writer.plan(engine.target, 0, _Uncompiled(), entries)
    return engine_traffic(plan, lambda entry: programs[entry.name])


class _Uncompiled(dict):
    """Any kernel, not compiled."""

    def __missing__(self, kernel: object) -> object:
        from specbuild.runtime.engine_dir.plan import CompiledKernel

        return CompiledKernel("folder/file:entry", "", "entry", 0, 0, 0)


def test_every_stored_tensor_is_read_once_by_some_pass(
    engine: LoweredEngine, traffic: EngineTraffic
) -> None:
    """By name, from the recipes of stored tensors."""
    stored = {name: recipe.nbytes for name, recipe in engine.weights.items()}
    looked_up = [n for n in stored if "embed_tokens" in n or "rope" in n or n == "d2t"]
    constants = [n for n in stored if n.startswith("constant")]
    experts = [n for n in stored if ".experts." in n]
    head = ["lm_head.packed", "model.norm.weight"]
    draft = [n for n in stored if n.startswith("draft.")]
    rest = set(stored) - {*looked_up, *constants, *experts, *head, *draft}
    assert len(experts) == 2 * 4 and rest and draft

    target = traffic.target.bytes_read(Work(3, 1, 0, experts=4))
    assert target.experts == sum(stored[n] for n in experts)
    assert target.head == sum(stored[n] for n in head)
    lookups = (
        stored["model.embed_tokens.weight"] // engine.weights["model.embed_tokens.weight"].shape[0]
    )
    rope = 2 * 2 * 16 * 4  # cos and sin of half a head, fp32, in each of two layers
    assert target.dense == sum(stored[n] for n in rest) + 3 * (lookups + rope)
    some = traffic.target.bytes_read(Work(3, 1, 0, experts=2.5))
    assert some.experts == pytest.approx(2.5 / 4 * target.experts)

    first = traffic.level(1, Work(1, 1, 0))
    assert first.total == first.draft
    fixed = sum(stored[n] for n in draft)
    # Beside the weights: a row of each table, one token of the cache, two constants.
    assert fixed < first.draft < fixed + 2000
    further = traffic.level(2, Work(1, 1, 0))
    fused = sum(stored[n] for n in draft if ".fc." in n)
    assert fused > 0
    assert first.draft - further.draft == pytest.approx(fused, abs=300)
    # Keys and values alone: the fusion and QKV, no O, MLP or head, and no cache is read.
    assert traffic.taken_up is not None
    taken_up = traffic.taken_up.bytes_read(Work(1, 1, 100)).total
    kept = sum(stored[n] for n in draft if ".fc." in n or "qkv" in n or "q_proj" in n)
    assert kept > fused and kept < taken_up < kept + 2000 < first.draft
    step = traffic.step(Work(3, 1, 9), top_k=1, depth=2)
    levels = [traffic.level(n, Work(1, 1, 9)) for n in (1, 2)]
    parts = [traffic.target.bytes_read(Work(3, 1, 9)), *levels]
    assert step.total == pytest.approx(sum(part.total for part in parts))


def test_sections_contain_every_op_in_order(engine: LoweredEngine) -> None:
    found = {}
    for entry, lowered in engine.programs:
        if entry.kind == "step":
            sections = step_sections(engine.writer.program(lowered).ops)
            found[entry.name] = [section.name for section in sections]
            ends = [-1] + [section.last for section in sections]
            assert [s.first for s in sections] == [end + 1 for end in ends[:-1]]
            assert ends[-1] == len(lowered.ir.calls) - 1
    assert found["step@1"] == found["step@1.logits"] == ["target", "accept"]
    assert found["step@1.draft-1-1-1"] == ["level 1", "select", "target", "accept"]
    assert found["step@1.draft-1-2-2"] == ["level 1", "level 2", "select", "target", "accept"]
    with pytest.raises(ValueError, match="decoding step"):
        step_sections([OpCall("Embed", {}, {}, {})])
    with pytest.raises(ValueError, match="decoding step"):
        step_sections([])


def test_every_router_of_a_step_declares_its_logits(
    engine: LoweredEngine, programs: dict[str, Program]
) -> None:
    """Four experts, two per row. The last entry of row_start counts live rows."""
    for name, program in programs.items():
        routing = [i for i, call in enumerate(program.ops) if call.op == "RmsMoe"]
        layers = 0 if name == "adjust" else 2  # it begins behind the target
        assert len(program.routers) == len(routing) == layers, name
        for op, router in zip(routing, program.routers, strict=True):
            call, launch = program.ops[op], program.launches[router.launch]
            assert launch.op == op
            assert "route" in engine.writer.kernels[launch.kernel].entry
            place = (POINTER, router.logits.buffer, router.logits.offset)
            assert place in launch.arguments
            in_front = [each for each in program.launches[: router.launch] if each.op == op]
            assert not any(place in each.arguments for each in in_front)
            assert router.logits.shape == (call.inputs["x"].shape[0], 4)
            assert router.row_start == call.inputs["row_start"]
            assert router.experts_per_token == 2
