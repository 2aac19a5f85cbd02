"""RmsMoe on a GPU. Decoding has four launches: route, gate/up, down, the sum of the experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Tactic,
    Workspace,
)
from specbuild.plugins_cuda.linear.storage import BF16, MXFP4, Storage
from specbuild.plugins_cuda.rms_moe.choice import ROUTER_PARTS, choice_of, router_parts
from specbuild.plugins_cuda.rms_moe.expert_codes import expert_storages
from specbuild.plugins_cuda.rms_moe.memory import (
    DOWN_KEYS,
    GATE_UP_KEYS,
    ExpertTactic,
    SharedLayout,
    Sizes,
    down_tactic,
    gate_up_tactic,
    lay_out_down,
    lay_out_gate_up,
)
from specbuild.plugins_cuda.rms_moe.packing import BLOCK
from specbuild.plugins_cuda.rms_moe.prefill import activation_code, lower_prefill, prefill_tactics
from specbuild.plugins_cuda.rms_norms import rounding_code, rounding_of
from specbuild.runtime.errors import SpecbuildError

FOLDER = "rms_moe"
MAX_DECODE_ROWS = 256
ROUTER_WARPS = 15
# The multiprocessors that the preceding dense layer leaves to the router. Its CTAs have one each; a
# CTA without one would request its weights only after that layer ends. A CTA therefore has 16
# experts if 8 need more CTAs, as long as the registers of a warp hold the weights of its blocks.
ROUTER_CTAS = 8
MAX_ROUTER_BLOCKS = {8: 9, 16: 6}
# In wider layers, shared memory holds the weights of 8 experts, and registers hold only x.
MAX_STAGED_BLOCKS = 15
MAX_HIDDEN = BLOCK * ROUTER_WARPS * MAX_STAGED_BLOCKS
# The threads of a CTA that adds the experts, and the columns of each.
ADD_THREADS, ADD_COLUMNS = 256, 4

_NAMES = (*GATE_UP_KEYS, *DOWN_KEYS)
_Numbers: TypeAlias = tuple[tuple[int, ...], ...]
_ByRows: TypeAlias = Mapping[int, _Numbers]
# For each maximum number of rows of a launch, gate/up's five numbers and down's; the first that
# fits is the default. Few rows wait for memory, and complete stages arrive fastest. With many rows
# the work of warps matters, and a ring of one stage in pieces leaves shared memory for more warps.
# Two tiles a warp halve the activations that it reads and, in down, its mma.
_CANDIDATES = {
    4: (
        (12, 2, 1, 8, 1, 12, 2, 1, 8, 1),
        (16, 2, 1, 8, 1, 16, 2, 1, 8, 1),
        (20, 2, 1, 8, 1, 20, 2, 1, 8, 1),
        (16, 1, 3, 8, 1, 16, 1, 3, 8, 1),
    ),
    8: (
        (20, 2, 1, 8, 1, 20, 2, 1, 8, 1),
        (16, 2, 1, 8, 1, 16, 2, 1, 8, 1),
        (12, 2, 1, 8, 1, 12, 2, 1, 8, 1),
    ),
    32: (
        (16, 2, 1, 8, 1, 8, 2, 1, 16, 2),
        (16, 1, 3, 8, 2, 16, 1, 3, 16, 2),
        (12, 2, 1, 16, 1, 8, 2, 1, 16, 2),
        (16, 2, 1, 8, 1, 12, 1, 3, 16, 2),
    ),
    MAX_DECODE_ROWS: (
        (20, 1, 3, 16, 1, 12, 1, 3, 16, 2),
        (12, 2, 1, 16, 1, 12, 1, 3, 16, 2),
        (16, 1, 3, 16, 1, 14, 1, 3, 16, 2),
        (12, 1, 3, 16, 2, 12, 1, 3, 16, 2),
        (12, 2, 1, 16, 1, 8, 2, 1, 16, 2),
    ),
}


# These come first if experts have at least this many rows on average. In passes of 16, half of the
# experts would need a second pass, whose weights are decoded again; passes of 24 avoid it.
ROWS_OF_LONG_PASSES = 12
_LONG_PASSES = ((20, 1, 3, 24, 1, 12, 1, 3, 16, 2),)


# The same for bf16, whose tiles are four times as large. With few rows there are few tiles, so the
# loads in flight per warp matter, and rings are as long as shared memory allows.
_CANDIDATES_OF_BF16 = {
    4: (
        (8, 5, 1, 8, 1, 16, 3, 1, 8, 1),
        (12, 3, 1, 8, 1, 16, 3, 1, 8, 1),
        (8, 4, 1, 8, 1, 12, 3, 1, 8, 1),
        (16, 2, 1, 8, 1, 16, 2, 1, 8, 1),
    ),
    8: (
        (12, 3, 1, 8, 1, 12, 3, 1, 8, 1),
        (8, 4, 1, 8, 1, 16, 2, 1, 8, 1),
        (16, 2, 1, 8, 1, 16, 2, 1, 8, 1),
    ),
    32: (
        (16, 2, 1, 8, 1, 12, 2, 1, 16, 2),
        (12, 2, 1, 8, 1, 8, 2, 1, 16, 2),
        (12, 2, 1, 16, 1, 8, 2, 1, 16, 2),
    ),
    MAX_DECODE_ROWS: (
        (12, 2, 1, 16, 1, 8, 2, 1, 16, 2),
        (16, 2, 1, 16, 1, 12, 1, 2, 16, 2),
        (12, 1, 2, 16, 1, 8, 1, 2, 16, 2),
    ),
}

# If none of these fits: 8 rows of so wide a layer leave memory for rings of one stage.
_OF_WIDE_ROWS = (
    (16, 1, 3, 8, 1, 12, 1, 3, 16, 2),
    (12, 1, 3, 8, 1, 12, 1, 3, 16, 2),
    (12, 1, 3, 8, 1, 8, 1, 3, 8, 1),
)
_OF_WIDE_ROWS_OF_BF16 = (
    (16, 1, 2, 8, 1, 12, 1, 2, 16, 2),
    (12, 1, 2, 8, 1, 12, 1, 2, 16, 2),
    (12, 1, 2, 8, 1, 8, 1, 2, 8, 1),
)

# For quantized values in units, whose stages are in one piece. None of these has been measured.
_CANDIDATES_IN_UNITS = {
    8: (
        (12, 3, 1, 8, 1, 12, 3, 1, 8, 1),
        (12, 2, 1, 8, 1, 12, 2, 1, 8, 1),
        (16, 2, 1, 8, 1, 16, 2, 1, 8, 1),
        (8, 4, 1, 8, 1, 8, 4, 1, 8, 1),
    ),
    MAX_DECODE_ROWS: (
        (12, 2, 1, 16, 1, 8, 2, 1, 16, 2),
        (12, 2, 1, 8, 1, 8, 2, 1, 8, 1),
        (8, 2, 1, 8, 1, 8, 2, 1, 8, 1),
    ),
}
_OF_WIDE_ROWS_IN_UNITS = (
    (12, 1, 1, 8, 1, 12, 1, 1, 8, 1),
    (8, 1, 1, 8, 1, 8, 1, 1, 8, 1),
)


def tactics(request: LoweringRequest, *, slices: int = 1) -> tuple[Tactic, ...]:
    """Return the tactics of decoding: an ``ExpertTactic`` of gate/up and one of down."""
    if request.phase == "prefill":
        return prefill_tactics(request)
    rows = request.tensors["x"].shape[0]
    by_rows, wide = _candidates(expert_storages(request))
    of_rows = next((some for most, some in by_rows.items() if rows <= most), ())
    if by_rows is _CANDIDATES and choice_of(request).rows_of_an_expert(rows) >= ROWS_OF_LONG_PASSES:
        of_rows = _LONG_PASSES + of_rows
    for some in (of_rows, wide if of_rows else ()):
        candidates = [dict(zip(_NAMES, each, strict=True)) for each in some]
        fitting = tuple(tactic for tactic in candidates if _layouts(request, tactic, slices))
        if fitting:
            return fitting
    return ()


def _candidates(storages: Mapping[str, Storage]) -> tuple[_ByRows, _Numbers]:
    """Return the candidates by the maximum rows of a launch, and those for very wide layers."""
    used = set(storages.values())
    if used == {MXFP4}:
        return _CANDIDATES, _OF_WIDE_ROWS
    if used == {BF16}:
        return _CANDIDATES_OF_BF16, _OF_WIDE_ROWS_OF_BF16
    return _CANDIDATES_IN_UNITS, _OF_WIDE_ROWS_IN_UNITS


def lower(request: LoweringRequest, *, slices: int = 1) -> Lowering:
    """Return the launches; SpecbuildError for unsupported requests.

    ``slices``: the warps that share K of a tile of gate/up in decoding; it affects the bits.
    """
    _check_types(request)
    if request.phase == "prefill":
        return lower_prefill(request)
    sizes = _checked(request, slices)
    candidates = tactics(request, slices=slices)
    tactic = dict(request.tactic or (candidates[0] if candidates else {}))
    layouts = _layouts(request, tactic, slices) if set(tactic) == set(_NAMES) else None
    if layouts is None:
        raise SpecbuildError(
            f"RmsMoe got tactic {tactic} for {sizes.rows} rows, expected {', '.join(_NAMES)} that "
            f"fit {request.target.shared_bytes_per_block} bytes of shared memory, as "
            f"{list(candidates)} do: use a smaller bucket, or measure tactics again."
        )
    launches = [
        _route(request, sizes),
        _gate_up(request, sizes, gate_up_tactic(tactic), layouts[0]),
    ]
    launches += _down(request, sizes, down_tactic(tactic), layouts[1])
    workspaces = [
        Workspace("workspace_normed", 2 * sizes.rows * sizes.hidden),
        Workspace("workspace_logits", choice_of(request).logits_bytes(sizes.rows)),
        Workspace("workspace_h", 2 * sizes.entries * sizes.inner),
        Workspace("workspace_partial", 4 * sizes.entries * sizes.hidden),
    ]
    return Lowering(tuple(launches), tuple(workspaces))


def _sizes(request: LoweringRequest, slices: int) -> Sizes:
    tensors = request.tensors
    rows, hidden = tensors["x"].shape
    experts, two_inner = tensors["gate_up_bias"].shape
    return Sizes(
        rows=rows,
        sequences=tensors["row_start"].shape[0] - 1,
        hidden=hidden,
        inner=two_inner // 2,
        experts=experts,
        top_k=int(request.attributes["top_k"]) + int(request.attributes["shared"]),
        slices=slices,
    )


def _checked(request: LoweringRequest, slices: int) -> Sizes:
    sizes, attributes = _sizes(request, slices), request.attributes
    if sizes.rows > MAX_DECODE_ROWS:
        raise SpecbuildError(
            f"RmsMoe's decoding kernels got {sizes.rows} rows, expected at most "
            f"{MAX_DECODE_ROWS}: use a smaller bucket, or the prefill phase."
        )
    choice_of(request)
    activation_code(attributes)
    if sizes.hidden % BLOCK or sizes.inner % BLOCK:
        raise SpecbuildError(
            f"RmsMoe got hidden {sizes.hidden} and inner {sizes.inner}, expected multiples of "
            f"{BLOCK}: build this model for the CPU."
        )
    if sizes.hidden > MAX_HIDDEN:
        raise SpecbuildError(
            f"RmsMoe got hidden {sizes.hidden}, the router's registers hold {MAX_HIDDEN}: build "
            "this model for the CPU."
        )
    return sizes


def _check_types(request: LoweringRequest) -> None:
    experts = expert_storages(request)
    others = {"row_start": "int32", **dict.fromkeys(ROUTER_PARTS, "float32")}
    for name, tensor in request.tensors.items():
        expected = others.get(name, "bfloat16")
        if name not in experts and tensor.dtype != expected:
            raise SpecbuildError(
                f"RmsMoe's {name} is {tensor.dtype} {tensor.shape}, expected {expected}."
            )


def _layouts(
    request: LoweringRequest, tactic: Tactic, slices: int
) -> tuple[SharedLayout, SharedLayout] | None:
    """Return the shared memory of gate/up and of down, or None if the tactic does not fit."""
    sizes, target = _sizes(request, slices), request.target
    gate_up = lay_out_gate_up(sizes, gate_up_tactic(tactic), target)
    down = lay_out_down(sizes, down_tactic(tactic), target)
    return (gate_up, down) if gate_up and down else None


def _expert_constants(
    request: LoweringRequest,
    sizes: Sizes,
    tactic: ExpertTactic,
    layout: SharedLayout,
    storage: Storage,
) -> tuple[tuple[str, int | float | str], ...]:
    """Return the constants of both expert kernels."""
    return (
        ("ROWS", sizes.rows),
        ("SEQUENCES", sizes.sequences),
        ("HIDDEN", sizes.hidden),
        ("INNER", sizes.inner),
        ("EXPERTS", sizes.experts),
        ("TOP_K", sizes.top_k),
        ("WEIGHTS", storage.code),
        ("CTAS", request.target.multiprocessors),
        ("WARPS", tactic.warps),
        ("RING_STAGES", tactic.stages),
        ("PIECES", tactic.pieces),
        ("PASS_ROWS", tactic.pass_rows),
        ("TILES", tactic.tiles),
        ("PLACES", layout.places),
        ("ROWS_RESIDENT", int(layout.rows_resident)),
        ("STATIC_BYTES", layout.static),
        ("SHARED_BYTES", layout.dynamic),
        *choice_of(request).of_experts(sizes.rows),
    )


def _route(request: LoweringRequest, sizes: Sizes) -> OpLaunch:
    choice, blocks = choice_of(request), sizes.hidden // BLOCK
    of_a_warp = -(-blocks // ROUTER_WARPS)
    many = choice.routed > 8 * ROUTER_CTAS and of_a_warp <= MAX_ROUTER_BLOCKS[16]
    experts, staged = 16 if many else 8, of_a_warp > MAX_ROUTER_BLOCKS[8]
    # A thread finishes a logit of 8 rows and the CTA's experts.
    warps = max(experts // 4, -(-blocks // of_a_warp))
    constants = (
        ("ROWS", sizes.rows),
        ("SEQUENCES", sizes.sequences),
        ("HIDDEN", sizes.hidden),
        ("EXPERTS", choice.routed),
        ("ROUTER_EXPERTS", experts),
        ("ROUTER_WARPS", warps),
        ("STAGED", int(staged)),
        ("ROUTER_NORM", int("router_norm" in request.tensors)),
        ("NORM_ROUNDING", rounding_code(rounding_of("RmsMoe", request.attributes))),
        ("EPS", float(request.attributes["eps"])),
        *choice.of_router(sizes.rows),
    )
    parts = router_parts(request)
    entry, file = (
        ("route_with_parts", "route_with_parts.cu") if parts else ("route_rows", "route.cu")
    )
    return OpLaunch(
        kernel=Kernel(FOLDER, entry, constants, file=file),
        grid=(-(-choice.router_rows // experts), -(-sizes.rows // 8), 1),
        block=32 * warps,
        shared_bytes=512 * warps * of_a_warp if staged else 0,
        arguments=(
            *("x", "norm", "router_weight", "router_bias", "row_start"),
            *parts,
            *("workspace_normed", "workspace_logits"),
        ),
    )


def _gate_up(
    request: LoweringRequest, sizes: Sizes, tactic: ExpertTactic, layout: SharedLayout
) -> OpLaunch:
    constants = (
        *_expert_constants(request, sizes, tactic, layout, expert_storages(request)["gate_up"]),
        ("SLICES", sizes.slices),
        ("ACTIVATION", activation_code(request.attributes)),
        ("ALPHA", float(request.attributes["alpha"])),
        ("LIMIT", float(request.attributes["limit"])),
    )
    return OpLaunch(
        kernel=Kernel(FOLDER, "gate_up_experts", constants, file="gate_up.cu"),
        grid=(request.target.multiprocessors, 1, 1),
        block=32 * tactic.warps,
        shared_bytes=layout.dynamic,
        arguments=(
            "gate_up",
            "gate_up_bias",
            "row_start",
            "workspace_normed",
            "workspace_logits",
            "workspace_h",
        ),
        triggers_late=True,
    )


def _down(
    request: LoweringRequest, sizes: Sizes, tactic: ExpertTactic, layout: SharedLayout
) -> list[OpLaunch]:
    constants = (
        *_expert_constants(request, sizes, tactic, layout, expert_storages(request)["down"]),
        ("ADD_THREADS", ADD_THREADS),
        ("ADD_COLUMNS", ADD_COLUMNS),
        ("RESIDUAL", int(request.attributes["residual"])),
    )
    read = ("workspace_h", "workspace_logits")
    return [
        OpLaunch(
            kernel=Kernel(FOLDER, "down_experts", constants, file="down.cu"),
            grid=(request.target.multiprocessors, 1, 1),
            block=32 * tactic.warps,
            shared_bytes=layout.dynamic,
            arguments=("down", "down_bias", "row_start", *read, "workspace_partial"),
            reads_early=True,
        ),
        OpLaunch(
            kernel=Kernel(FOLDER, "add_experts", constants, file="down.cu", hot=False),
            grid=(-(-sizes.hidden // (ADD_THREADS * ADD_COLUMNS)), sizes.rows, 1),
            block=ADD_THREADS,
            shared_bytes=0,
            arguments=("x", "row_start", "y", "workspace_partial"),
        ),
    ]
