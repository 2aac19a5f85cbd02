"""Which experts a step really chose: its router logits, read back layer by layer."""

from __future__ import annotations

import numpy as np

from specbuild.runtime.engine_dir.plan import ExpertGroups, ProgramEntry, RouterLogits
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
            chosen = chosen_experts(
                _live_logits(executor, router), router.experts_per_token, router.groups
            )
            found.append(len(np.unique(chosen)))
    executor.synchronize()
    return float(np.mean(found)) if found else None


def chosen_experts(
    logits: np.ndarray, top_k: int, groups: ExpertGroups | None = None
) -> np.ndarray:
    """The experts of every row, [rows, top_k], from logits [rows, experts]; ties: the lower id."""
    if groups is not None:
        logits = _in_best_groups(logits, groups)
    return _best(logits, top_k)


def _in_best_groups(logits: np.ndarray, groups: ExpertGroups) -> np.ndarray:
    """``logits``, −inf outside the groups that score best."""
    by_group = logits.reshape(len(logits), groups.count, -1)
    scores = np.sort(by_group, axis=2)[:, :, -groups.summed :].sum(axis=2)
    closed = np.ones(scores.shape, bool)
    np.put_along_axis(closed, _best(scores, groups.chosen), values=False, axis=1)
    masked: np.ndarray = np.where(closed[:, :, None], -np.inf, by_group).reshape(logits.shape)
    return masked


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


def _live_logits(executor: CudaExecutor, router: RouterLogits) -> np.ndarray:
    """Logits of the live rows; what follows them in the scratch is not of this step."""
    ends, logits = router.row_start, router.logits
    row_start = executor.peek(ends.buffer, ends.offset, 4 * ends.shape[0]).view(np.int32)
    live, experts = int(row_start[-1]), logits.shape[1]
    data = executor.peek(logits.buffer, logits.offset, 4 * live * experts)
    return data.view(np.float32).reshape(live, experts)
