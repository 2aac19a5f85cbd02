"""RmsMoe on a GPU; when decoding three launches: route, gate/up, down (and the experts' sum)."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    OpLaunch,
    Tactic,
    Workspace,
)
from specbuild.plugins_cuda.rms_moe.memory import SharedPlan, Sizes, plan_down, plan_gate_up
from specbuild.plugins_cuda.rms_moe.packing import (
    BLOCK,
    TILE_OUTPUTS,
    down_steps,
    gate_up_steps,
    tile_bytes,
)
from specbuild.plugins_cuda.rms_moe.prefill import lower_prefill, prefill_tactics
from specbuild.runtime.errors import SpecbuildError

FOLDER = "rms_moe"
MOST_DECODE_ROWS = 256
ROUTER_WARPS = 15
ROUTER_EXPERTS = 8
ADD_COLUMNS = 256

_NAMES = ("warps", "stages", "pass_rows", "spread", "down_warps", "beside")
# By whether a launch has at most 8 rows.
_CANDIDATES = {
    True: (
        (16, 2, 8, 1, 16, 0),
        (12, 2, 8, 1, 12, 0),
        (12, 2, 8, 0, 12, 1),
        (12, 2, 8, 0, 12, 0),
        (12, 2, 8, 1, 10, 1),
        (16, 2, 8, 0, 12, 0),
        (20, 2, 8, 1, 20, 0),
    ),
    False: (
        (12, 2, 16, 0, 12, 0),
        (12, 2, 16, 1, 12, 0),
        (14, 2, 16, 1, 14, 0),
        (10, 3, 16, 1, 10, 0),
        (16, 2, 8, 1, 16, 0),
        (20, 2, 8, 1, 20, 0),
    ),
}


def tactics(request: LoweringRequest) -> tuple[Tactic, ...]:
    """When decoding: warps and stages a ring of gate/up, rows of one pass over a weight.

    ``spread`` divides the down projection over the CTAs by experts and sums in a fourth launch;
    without it every multiprocessor holds all of h, which few rows allow. Its ``down_warps`` take
    less memory with ``beside``, so that its CTAs start while those of gate/up run.
    """
    if request.phase == "prefill":
        return prefill_tactics(request)
    few = request.tensors["x"].shape[0] <= 8
    candidates = [dict(zip(_NAMES, each, strict=True)) for each in _CANDIDATES[few]]
    return tuple(tactic for tactic in candidates if _plans(request, tactic))


def lower(request: LoweringRequest) -> Lowering:
    """The launches; SpecbuildError where the kernels cannot compute it."""
    _check_types(request, _sizes(request))
    if request.phase == "prefill":
        return lower_prefill(request)
    sizes = _checked(request)
    fitting = tactics(request)
    tactic = dict(request.tactic or (fitting[0] if fitting else {}))
    if tactic not in fitting:
        raise SpecbuildError(
            f"RmsMoe got tactic {tactic} for {sizes.rows} rows, expected one of those that "
            f"fit {request.target.shared_bytes_per_block} bytes of shared memory, "
            f"{list(fitting)}: use a smaller bucket."
        )
    plans = _plans(request, tactic)
    assert plans is not None
    launches = [_route(request, sizes, tactic), _gate_up(request, sizes, tactic, plans[0])]
    launches += _down(request, sizes, tactic, plans[1])
    workspaces = [
        Workspace("workspace_normed", 2 * sizes.rows * sizes.hidden),
        Workspace("workspace_logits", 4 * sizes.rows * sizes.experts),
        Workspace("workspace_routing", 4 * sizes.routing_ints(tactic["pass_rows"])),
        Workspace("workspace_weights", 4 * sizes.entries),
        Workspace("workspace_arrivals", 4, zeroed=True),
        Workspace("workspace_h", 2 * sizes.entries * sizes.inner),
    ]
    if tactic["spread"]:
        workspaces.append(Workspace("workspace_partial", 4 * sizes.entries * sizes.hidden))
    return Lowering(tuple(launches), tuple(workspaces))


def _sizes(request: LoweringRequest) -> Sizes:
    tensors = request.tensors
    rows, hidden = tensors["x"].shape
    experts, two_inner = tensors["gate_up_bias"].shape
    return Sizes(
        rows=rows,
        sequences=tensors["row_start"].shape[0] - 1,
        hidden=hidden,
        inner=two_inner // 2,
        experts=experts,
        top_k=int(request.attributes["top_k"]),
    )


def _checked(request: LoweringRequest) -> Sizes:
    sizes, attributes = _sizes(request), request.attributes
    if sizes.rows > MOST_DECODE_ROWS:
        raise SpecbuildError(
            f"RmsMoe's decoding kernels got {sizes.rows} rows, expected at most "
            f"{MOST_DECODE_ROWS}: use a smaller bucket, or the prefill phase."
        )
    if attributes["gating"] != "softmax_selected":
        raise SpecbuildError(
            f"RmsMoe got gating {attributes['gating']!r}, its CUDA kernels know only "
            "'softmax_selected': build this model for the CPU."
        )
    if sizes.hidden % BLOCK or sizes.inner % BLOCK or not 1 <= sizes.top_k <= min(8, sizes.experts):
        raise SpecbuildError(
            f"RmsMoe got hidden {sizes.hidden}, inner {sizes.inner}, top {sizes.top_k} of "
            f"{sizes.experts} experts, expected widths that are multiples of {BLOCK} and at most "
            "8 experts a row: build this model for the CPU."
        )
    return sizes


def _check_types(request: LoweringRequest, sizes: Sizes) -> None:
    packed = {
        "gate_up": (
            sizes.experts,
            sizes.inner // TILE_OUTPUTS,
            tile_bytes(gate_up_steps(sizes.hidden)),
        ),
        "down": (
            sizes.experts,
            sizes.hidden // TILE_OUTPUTS,
            tile_bytes(down_steps(sizes.inner)),
        ),
    }
    for name, tensor in request.tensors.items():
        wanted = "uint8" if name in packed else "int32" if name == "row_start" else "bfloat16"
        shape = packed.get(name, tensor.shape)
        if tensor.dtype != wanted or tensor.shape != shape:
            raise SpecbuildError(
                f"RmsMoe's {name} is {tensor.dtype} {tensor.shape}, expected {wanted} {shape}: "
                "give bfloat16 tensors and weights packed by rms_moe/packing.py."
            )


def _plans(request: LoweringRequest, tactic: Tactic) -> tuple[SharedPlan, SharedPlan] | None:
    """Shared memory of gate/up and of down; None where the tactic does not fit."""
    sizes, target = _sizes(request), request.target
    gate_up = plan_gate_up(sizes, tactic, target)
    down = gate_up and plan_down(sizes, tactic, target, gate_up)
    return (gate_up, down) if gate_up and down else None


def _constants(
    sizes: Sizes, tactic: Tactic, **more: float
) -> tuple[tuple[str, int | float | str], ...]:
    return (
        ("ROWS", sizes.rows),
        ("HIDDEN", sizes.hidden),
        ("EXPERTS", sizes.experts),
        ("TOP_K", sizes.top_k),
        ("PASS_ROWS", tactic["pass_rows"]),
        *more.items(),
    )


def _route(request: LoweringRequest, sizes: Sizes, tactic: Tactic) -> OpLaunch:
    blocks = sizes.hidden // BLOCK
    warps = -(-blocks // -(-blocks // ROUTER_WARPS))
    constants = _constants(
        sizes,
        tactic,
        SEQUENCES=sizes.sequences,
        ROUTER_WARPS=warps,
        EPS=float(request.attributes["eps"]),
    )
    return OpLaunch(
        kernel=Kernel(FOLDER, "route_rows", constants, file="route.cu"),
        grid=(-(-sizes.experts // ROUTER_EXPERTS), -(-sizes.rows // 8), 1),
        block=32 * warps,
        shared_bytes=0,
        arguments=(
            "x",
            "norm",
            "router_weight",
            "router_bias",
            "row_start",
            "workspace_normed",
            "workspace_logits",
            "workspace_routing",
            "workspace_weights",
            "workspace_arrivals",
        ),
    )


def _gate_up(request: LoweringRequest, sizes: Sizes, tactic: Tactic, plan: SharedPlan) -> OpLaunch:
    constants = _constants(
        sizes,
        tactic,
        SEQUENCES=sizes.sequences,
        INNER=sizes.inner,
        WARPS=tactic["warps"],
        RING_STAGES=tactic["stages"],
        ROWS_RESIDENT=int(plan.rows_resident),
        ALPHA=float(request.attributes["alpha"]),
        LIMIT=float(request.attributes["limit"]),
    )
    return OpLaunch(
        kernel=Kernel(FOLDER, "gate_up_experts", constants, file="gate_up.cu"),
        grid=(request.target.multiprocessors, 1, 1),
        block=32 * tactic["warps"],
        shared_bytes=plan.dynamic,
        arguments=(
            "gate_up",
            "gate_up_bias",
            "row_start",
            "workspace_normed",
            "workspace_logits",
            "workspace_routing",
            "workspace_h",
        ),
    )


def _down(
    request: LoweringRequest, sizes: Sizes, tactic: Tactic, plan: SharedPlan
) -> list[OpLaunch]:
    constants = _constants(
        sizes,
        tactic,
        SEQUENCES=sizes.sequences,
        INNER=sizes.inner,
        WARPS=tactic["down_warps"],
        RING_STAGES=tactic["stages"],
        SLOTS=plan.slots,
        ROWS_RESIDENT=int(plan.rows_resident),
        OWNED_TILES=sizes.owned_tiles(request.target),
        SPREAD=tactic["spread"],
        ADD_COLUMNS=ADD_COLUMNS,
    )
    block = 32 * tactic["down_warps"]
    read = ("workspace_h", "workspace_logits", "workspace_routing", "workspace_weights")
    if not tactic["spread"]:
        grid = min(request.target.multiprocessors, sizes.hidden // TILE_OUTPUTS)
        return [
            OpLaunch(
                kernel=Kernel(FOLDER, "down_owned_rows", constants, file="down.cu"),
                grid=(grid, 1, 1),
                block=block,
                shared_bytes=plan.dynamic,
                arguments=("x", "down", "down_bias", "row_start", "y", *read),
            )
        ]
    return [
        OpLaunch(
            kernel=Kernel(FOLDER, "down_spread", constants, file="down.cu"),
            grid=(request.target.multiprocessors, 1, 1),
            block=block,
            shared_bytes=plan.dynamic,
            arguments=("down", "down_bias", "row_start", *read, "workspace_partial"),
        ),
        OpLaunch(
            kernel=Kernel(FOLDER, "add_experts", constants, file="down.cu", hot=False),
            grid=(-(-sizes.hidden // ADD_COLUMNS), sizes.rows, 1),
            block=ADD_COLUMNS,
            shared_bytes=0,
            arguments=("x", "row_start", "y", "workspace_partial"),
        ),
    ]
