"""Which experts a step really chose: its router logits, read back layer by layer."""

from __future__ import annotations

import numpy as np

from specbuild.runtime.engine_dir.plan import ProgramEntry, RouterLogits
from specbuild.runtime.executors.cuda.executor import CudaExecutor


def experts_touched(executor: CudaExecutor, entry: ProgramEntry) -> float | None:
    """Distinct experts that a program's rows choose, on average over the layers.

    The program runs once, launch by launch, from the state that the device is in; it moves its
    sequences on. None where nothing of it routes.
    """
    runner = executor.runner
    routers = {router.launch: router for router in runner.described(entry).routers}
    found = []
    for index, config in enumerate(runner.program(entry).launches):
        runner.gpu.launch(config, runner.stream)
        if index in routers:
            router = routers[index]
            chosen = chosen_experts(_live_logits(executor, router), router.experts_per_token)
            found.append(len(np.unique(chosen)))
    executor.synchronize()
    return float(np.mean(found)) if found else None


def chosen_experts(logits: np.ndarray, top_k: int) -> np.ndarray:
    """The experts of every row, [rows, top_k], from logits [rows, experts]; ties: the lower id."""
    return np.argsort(-logits, axis=1, kind="stable")[:, :top_k]


def _live_logits(executor: CudaExecutor, router: RouterLogits) -> np.ndarray:
    """Logits of the live rows; what follows them in the scratch is not of this step."""
    ends, logits = router.row_start, router.logits
    row_start = executor.peek(ends.buffer, ends.offset, 4 * ends.shape[0]).view(np.int32)
    live, experts = int(row_start[-1]), logits.shape[1]
    data = executor.peek(logits.buffer, logits.offset, 4 * live * experts)
    return data.view(np.float32).reshape(live, experts)
