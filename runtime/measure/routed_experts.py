"""Which experts a step really chose: its router logits, read back layer by layer."""

from __future__ import annotations

import numpy as np

from specbuild.runtime.engine_dir.plan import POINTER, Launch, OpCall, ProgramEntry
from specbuild.runtime.executors.cuda.executor import CudaExecutor

# The router's launch and its argument with the logits, fp32 [rows, experts] of the live rows.
ROUTER, LOGITS_ARGUMENT = "route_rows", 6
_MOE = "RmsMoe"


def experts_touched(executor: CudaExecutor, entry: ProgramEntry) -> float | None:
    """Distinct experts that a program's rows choose, on average over the layers.

    The program runs once, launch by launch, from the state that the device is in; it moves its
    sequences on. None where it has no router whose logits can be read.
    """
    runner = executor.runner
    described, configs = runner.described(entry), runner.program(entry).launches
    found = []
    for launch, config in zip(described.launches, configs, strict=True):
        runner.gpu.launch(config, runner.stream)
        call = described.ops[launch.op]
        if _routes(executor, launch, call):
            chosen = chosen_experts(_logits(executor, launch, call), int(call.attributes["top_k"]))
            found.append(len(np.unique(chosen)))
    executor.synchronize()
    return float(np.mean(found)) if found else None


def chosen_experts(logits: np.ndarray, top_k: int) -> np.ndarray:
    """The experts of every row, [rows, top_k], from logits [rows, experts]; ties: the lower id."""
    return np.argsort(-logits, axis=1, kind="stable")[:, :top_k]


def _routes(executor: CudaExecutor, launch: Launch, call: OpCall) -> bool:
    return (
        call.op == _MOE
        and executor.plan.kernels[launch.kernel].entry == ROUTER
        and launch.arguments[LOGITS_ARGUMENT][0] == POINTER
    )


def _logits(executor: CudaExecutor, launch: Launch, call: OpCall) -> np.ndarray:
    """Router logits of the live rows; what follows them in the scratch is not of this step."""
    ends = call.inputs["row_start"]
    row_start = executor.peek(ends.buffer, ends.offset, 4 * ends.shape[0]).view(np.int32)
    live, experts = int(row_start[-1]), call.inputs["router_weight"].shape[0]
    _, buffer, offset = launch.arguments[LOGITS_ARGUMENT]
    data = executor.peek(buffer, offset, 4 * live * experts)
    return data.view(np.float32).reshape(live, experts)
