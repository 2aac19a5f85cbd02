"""Reads the experts that a step selected, from its router logits of each layer."""

from __future__ import annotations

import numpy as np

from specbuild.runtime.engine_dir.plan import ExpertGroups, ProgramEntry, RouterLogits
from specbuild.runtime.executors.cuda.executor import CudaExecutor


def experts_touched(executor: CudaExecutor, entry: ProgramEntry) -> float | None:
    """Return the number of distinct experts that a program's rows select, averaged over layers.

    The program runs once, launch by launch, from the current state of the device, and advances its
    sequences. Returns None if no op routes.
    """
    runner = executor.runner
    routers = {router.launch: router for router in runner.described(entry).routers}
    distinct = []
    for index, config in enumerate(runner.program(entry).launches):
        runner.gpu.launch(config, runner.stream)
        if index in routers:
            router = routers[index]
            chosen = chosen_experts(
                _live_logits(executor, router), router.experts_per_token, router.groups
            )
            distinct.append(len(np.unique(chosen)))
    executor.synchronize()
    return float(np.mean(distinct)) if distinct else None


def chosen_experts(
    logits: np.ndarray, top_k: int, groups: ExpertGroups | None = None
) -> np.ndarray:
    """Return each row's experts [rows, top_k] from logits [rows, experts]; ties: lower id."""
    if groups is not None:
        logits = _in_best_groups(logits, groups)
    return _best(logits, top_k)


def _in_best_groups(logits: np.ndarray, groups: ExpertGroups) -> np.ndarray:
    """Return ``logits`` with −inf outside the groups with the best scores."""
    by_group = logits.reshape(len(logits), groups.count, -1)
    scores = np.sort(by_group, axis=2)[:, :, -groups.summed :].sum(axis=2)
    excluded = np.ones(scores.shape, bool)
    np.put_along_axis(excluded, _best(scores, groups.chosen), values=False, axis=1)
    masked: np.ndarray = np.where(excluded[:, :, None], -np.inf, by_group).reshape(logits.shape)
    return masked


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


def _live_logits(executor: CudaExecutor, router: RouterLogits) -> np.ndarray:
    """Return the logits of the live rows; the rest of the scratch is not from this step."""
    ends, logits = router.row_start, router.logits
    row_start = executor.peek(ends.buffer, ends.offset, 4 * ends.shape[0]).view(np.int32)
    live, experts = int(row_start[-1]), logits.shape[1]
    data = executor.peek(logits.buffer, logits.offset, 4 * live * experts)
    return data.view(np.float32).reshape(live, experts)
