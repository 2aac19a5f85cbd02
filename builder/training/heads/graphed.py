"""Micro batches learned as one launch each: a CUDA graph of the first, replayed.

A step of a small model is some thousands of small kernels, which Python launches more slowly than
a GPU computes them.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from specbuild.builder.training.heads.options import HeadOptions
from specbuild.builder.training.heads.workers import Workers
from specbuild.builder.training.objective import Batch

Learn = Callable[[Batch], torch.Tensor]
# Kernels and workspaces that are loaded late must be there before the capture.
_WARM_UPS = 3


def may_replay(options: HeadOptions, workers: Workers) -> bool:
    """Whether a graph can stand for every micro batch: one process, one GPU, one shape.

    Layers that are computed again (``checkpointing``) are for models whose kernels are large.
    """
    size = options.micro_batch_size or options.batch_size
    alike = options.batch_size % size == 0 or size > options.batch_size
    on_gpu = workers.device.startswith("cuda")
    return on_gpu and workers.count == 1 and alike and not options.checkpointing


class GraphedLearning:
    """Replays ``learn`` on other rows of the shape of ``first``.

    Gradients are added to the ``.grad`` that ``trained`` have from here on: they may be zeroed,
    not replaced. What ``learn`` reads besides rows and parameters is as it was at the capture.

    Raises:
        RuntimeError: ``learn`` waits for the device, or does what else a graph cannot hold; it can
            still be called itself.
    """

    def __init__(self, learn: Learn, trained: list[nn.Parameter], first: Batch) -> None:
        gc.collect()  # gradients of passes that are forgotten belong to another stream
        self._rows = Batch(first.ids.clone(), first.counted.clone())
        self._graph = torch.cuda.CUDAGraph()
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in trained if p.grad is not None]
        before, beside = torch.cuda.current_stream(), torch.cuda.Stream()
        beside.wait_stream(before)
        try:
            # The block also leaves the stream where a capture that failed would not.
            with torch.cuda.stream(beside):
                for _ in range(_WARM_UPS - 1):
                    learn(self._rows)
                with _no_waiting():  # before a capture, which would not survive it
                    learn(self._rows)
                with torch.cuda.graph(self._graph, stream=beside):
                    self._found = learn(self._rows)
                self._graph.replay()  # the first one also uploads it
        finally:
            before.wait_stream(beside)
            torch._foreach_zero_(gradients)

    def __call__(self, rows: Batch) -> torch.Tensor:
        """Adds the gradients of ``rows``; returns their part of the terms, fp32 [terms]."""
        self._rows.ids.copy_(rows.ids)
        self._rows.counted.copy_(rows.counted)
        self._graph.replay()
        return self._found.clone()


@contextmanager
def _no_waiting() -> Iterator[None]:
    """RuntimeError where the host waits for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # that it does not see all of them
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
