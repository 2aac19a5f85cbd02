"""Programs before they are lowered, and the encoding of launches."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from specbuild.builder.backends.cuda.plan.plan_writer import PlanWriter, lower_program
from specbuild.builder.backends.cuda.step.ir import Call, ProgramIr, Storage, Tensor
from specbuild.builder.backends.cuda.step.programs import (
    batch_buckets,
    deepest,
    draft_shapes,
    fits,
)
from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    OpLaunch,
    Phase,
    TensorInfo,
    Workspace,
)
from specbuild.runtime.engine_dir.manifest import DraftShape, Limits
from specbuild.runtime.engine_dir.plan import FLOAT32, INT32, NULL, POINTER, ZEROED, Space

KERNEL = Kernel("linear", "linear")


def tensor(name: str, space: Space, shape: tuple[int, ...], dtype: str = "bfloat16") -> Tensor:
    info = TensorInfo(shape, dtype)
    return Tensor(Storage(name, space, info.nbytes), 0, info)


def limits(top_k: int, depth: int, tokens: int) -> Limits:
    return Limits(512, 4, 256, top_k, depth, tokens)


@pytest.mark.parametrize(
    ("sequences", "buckets"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 8)), (16, (1, 2, 4, 8, 16))]
)
def test_buckets_are_powers_of_two_that_hold_the_batch(
    sequences: int, buckets: tuple[int, ...]
) -> None:
    assert batch_buckets(sequences) == buckets


def test_steps_have_short_chains_and_the_requested_shapes() -> None:
    chains = [DraftShape(1, depth, depth) for depth in (1, 2, 3, 4)]
    assert draft_shapes(limits(1, 4, 4)) == tuple(chains)
    assert draft_shapes(limits(1, 2, 2)) == tuple(chains[:2])
    assert draft_shapes(limits(1, 7, 7)) == (*chains, DraftShape(1, 7, 7))
    assert draft_shapes(limits(8, 8, 60)) == (*chains, DraftShape(8, 8, 60))
    assert deepest(draft_shapes(limits(8, 8, 60))) == 8
    assert draft_shapes(limits(0, 0, 0)) == ()
    assert deepest(()) == 0


def test_no_launch_of_a_step_has_more_than_256_rows() -> None:
    chain, tree = DraftShape(1, 4, 4), DraftShape(8, 8, 60)
    assert fits(256, DraftShape(0, 0, 0), depth=8)
    assert fits(32, chain, depth=4) and not fits(64, chain, depth=4)
    # The draft first catches up on the tokens that the deepest draft of any step had accepted.
    assert fits(32, chain, depth=7) and not fits(32, chain, depth=8)
    assert fits(4, tree, depth=8) and not fits(8, tree, depth=8)


def linear(program: ProgramIr, **changes: Tensor | None) -> dict[str, Tensor]:
    inputs = {
        "x": tensor("x", "state", (3, 64)),
        "weight": tensor("weight", "weights", (2, 2, 512)),
        "residual": tensor("residual", "state", (3, 32)),
        **changes,
    }
    return program.call("Linear", inputs, sizes={"rows": 32})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": None}, r"missing inputs \['weight'\]"),
        ({"table": tensor("t", "weights", (3, 3))}, r"unknown inputs \['table'\]"),
        ({"residual": tensor("r", "state", (4, 32))}, "axis T is 4, expected 3"),
        ({"x": tensor("x", "state", (3, 8, 8))}, r"shape \(3, 8, 8\) for the axes"),
    ],
)
def test_rejects_a_call_that_does_not_match_its_declaration(
    changes: dict[str, Tensor | None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        linear(ProgramIr("p", "decode"), **changes)


def test_rejects_an_undefined_size() -> None:
    program = ProgramIr("p", "decode")
    ids, table = tensor("ids", "state", (3,), "int32"), tensor("t", "weights", (5, 8))
    read = program.call("Embed", {"token_ids": ids, "table": table}, sizes={"H": 8})
    assert read["x"].shape == (3, 8)
    with pytest.raises(ValueError, match=r"Linear.y: the size of \['rows'\] is not defined"):
        program.call("Linear", {"x": tensor("x", "state", (3, 64)),
                                "weight": tensor("w", "weights", (2, 2, 512))})  # fmt: skip


def test_rejects_a_view_that_is_larger_than_its_buffer() -> None:
    pages = tensor("pages", "state", (4, 7), "int32")
    assert pages.view(2, 7).shape == (2, 7)
    with pytest.raises(ValueError, match=r"cannot view \(4, 7\) as \(5, 7\)"):
        pages.view(5, 7)


def launched(call: Call, phase: Phase) -> Lowering:
    """Return one launch with arguments of every kind and two kinds of scratch memory."""
    assert call.op.name == "Linear" and phase == "decode"
    arguments = ("x", "weight", "bias", "residual", "y", "workspace", "workspace_done", -7, 0.1)
    return Lowering(
        (OpLaunch(KERNEL, (2, 1, 1), 64, 0, arguments),),
        (Workspace("workspace", 300), Workspace("workspace_done", 4, zeroed=True)),
    )


def test_arguments_are_addresses_numbers_and_null() -> None:
    ir = ProgramIr("p", "decode")
    y = linear(ir)["y"]
    linear(ir, x=tensor("x2", "state", (3, 64)), residual=y)
    lowered = lower_program(ir, launched)
    calls = [t for call in ir.calls for t in call.inputs.values() if t.storage.space == "state"]
    ports = {t.storage.name: t for t in calls}
    weight = ir.calls[0].inputs["weight"]
    writer = PlanWriter([lowered], [weight], [], ports)
    with pytest.raises(AssertionError, match="share a name"):
        PlanWriter([lowered], [weight, weight], [], ports)
    names = [buffer.name for buffer in writer.buffers]
    assert names == ["weight", "x", "residual", "x2", ZEROED, "arena"]
    program = writer.program(lowered)
    first, then = (launch.arguments for launch in program.launches)
    assert first[:4] == ((POINTER, 1, 0), (POINTER, 0, 0), (NULL,), (POINTER, 2, 0))
    assert first[6:] == (
        (POINTER, 4, 0), (INT32, -7), (FLOAT32, struct.unpack("<I", struct.pack("<f", 0.1))[0]),
    )  # fmt: skip
    assert writer.buffers[4].bytes == 256
    # y is live from the first op to the second; a workspace is live during its op only.
    assert then[3] == first[4] and first[4][:2] == first[5][:2] == (POINTER, 5)
    assert len({first[4], first[5], then[4]}) == 3
    assert [launch.op for launch in program.launches] == [0, 1]


@pytest.mark.parametrize("late", [False, True])
def test_early_readers_start_early_after_late_triggers_only(late: bool) -> None:
    ir = ProgramIr("p", "decode")
    linear(ir, residual=linear(ir)["y"])

    def lower(call: Call, phase: Phase) -> Lowering:
        lowering = launched(call, phase)
        [launch] = lowering.launches
        front = replace(launch, triggers_late=late)
        return replace(lowering, launches=(front, replace(launch, reads_early=True), launch))

    lowered = lower_program(ir, lower)
    ports = {t.storage.name: t for call in ir.calls for t in call.inputs.values()}
    writer = PlanWriter([lowered], [ports.pop("weight")], [], ports)
    early = [launch.programmatic for launch in writer.program(lowered).launches]
    assert early == [True, late, True] * 2
