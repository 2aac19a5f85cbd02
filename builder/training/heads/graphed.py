"""Runs micro batches as one launch each: captures the first as a CUDA graph and replays it.

A step of a small model has thousands of small kernels, and a GPU computes them faster than Python
launches them.
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
# Warm-up passes load kernels and workspaces, which a capture cannot.
_WARM_UP_PASSES = 3


def may_replay(options: HeadOptions, workers: Workers) -> bool:
    """Return whether a graph can run every micro batch: one process, one GPU, one shape.

    ``checkpointing`` is for models with large kernels, which do not need a graph.
    """
    size = options.micro_batch_size or options.batch_size
    is_one_shape = options.batch_size % size == 0 or size > options.batch_size
    on_gpu = workers.device.startswith("cuda")
    return on_gpu and workers.count == 1 and is_one_shape and not options.checkpointing


class GraphedLearning:
    """Replays ``learn`` on other rows of the shape of ``first``.

    Gradients are added to the ``.grad`` that the parameters ``trained`` have after construction.
    They may be zeroed, but not replaced. Other inputs of ``learn`` are those of the capture.

    Raises:
        RuntimeError: ``learn`` synchronizes with the device or does something else that a graph
            does not support. It can still be called directly.
    """

    def __init__(self, learn: Learn, trained: list[nn.Parameter], first: Batch) -> None:
        gc.collect()  # gradients of discarded passes belong to another stream
        self._rows = Batch(first.ids.clone(), first.counted.clone())
        self._graph = torch.cuda.CUDAGraph()
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in trained if p.grad is not None]
        current_stream, side_stream = torch.cuda.current_stream(), torch.cuda.Stream()
        side_stream.wait_stream(current_stream)
        try:
            # The context also restores the stream, which a failed capture does not.
            with torch.cuda.stream(side_stream):
                for _ in range(_WARM_UP_PASSES - 1):
                    learn(self._rows)
                with _forbid_synchronization():  # before the capture, which it would break
                    learn(self._rows)
                with torch.cuda.graph(self._graph, stream=side_stream):
                    self._terms = learn(self._rows)
                self._graph.replay()  # the first replay also uploads the graph
        finally:
            current_stream.wait_stream(side_stream)
            torch._foreach_zero_(gradients)

    def __call__(self, rows: Batch) -> torch.Tensor:
        """Add the gradients of ``rows``; return their part of the terms, fp32 [terms]."""
        self._rows.ids.copy_(rows.ids)
        self._rows.counted.copy_(rows.counted)
        self._graph.replay()
        return self._terms.clone()


@contextmanager
def _forbid_synchronization() -> Iterator[None]:
    """Raise RuntimeError if the host waits for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # PyTorch warns that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
