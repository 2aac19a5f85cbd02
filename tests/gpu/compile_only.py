"""Compile everything that the tests of this folder launch, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from specbuild.builder.backends.cuda.tuning import kernel_case
from specbuild.builder.backends.cuda.tuning.op_runner import OpRunner
from specbuild.plugins_cuda.launches import Lowering
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.plugins_cuda.torch_ops import fake_outputs
from specbuild.runtime.executors.cuda import driver


def compile_only() -> None:
    """Replace functions that run on a GPU by ones that only compile, and references by shapes."""
    runner: Any = OpRunner
    runner.__init__ = _without_gpu
    runner.run = _compile
    runner.resident = lambda *_: nullcontext({})
    cases: Any = kernel_case
    cases.reference_outputs = _shapes
    cases.np = _Numpy()
    drivers: Any = driver
    drivers.open_gpu = lambda: SimpleNamespace(close=lambda: None)


class _Ones(np.random.Generator):
    """Draws no normally distributed numbers: those of weights of real size would take minutes."""

    def __init__(self, seed: int) -> None:
        super().__init__(np.random.PCG64(seed))

    def standard_normal(self, size: Any = None, dtype: Any = float, out: Any = None) -> Any:
        assert out is None
        return 1.0 if size is None else np.ones(size, dtype)


class _Numpy:
    """numpy, but for its random generator."""

    random = SimpleNamespace(default_rng=_Ones)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def _without_gpu(runner: OpRunner, compiler: Any) -> None:
    runner._compiler, runner._cubins, runner._registers = compiler, {}, {}
    runner.multiprocessors = 132


def _compile(
    runner: OpRunner, _op: OpSpec, lowering: Lowering, _inputs: object,
    outputs: Mapping[str, np.ndarray], **_: object,
) -> dict[str, np.ndarray]:  # fmt: skip
    runner.prepare([lowering])
    return {name: np.zeros_like(array) for name, array in outputs.items()}


def _shapes(op: OpSpec, tensors: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Any:
    try:
        return fake_outputs(op, tuple(tensors))
    except (ValueError, AttributeError):  # an axis that no input names
        pass
    try:
        with torch.device("meta"):
            meta = [None if tensor is None else tensor.to("meta") for tensor in tensors]
            results = op.reference(*meta, **attributes)
    except (NotImplementedError, RuntimeError):  # a size that depends on data
        return op.reference(*tensors, **attributes)
    return tree_map(_empty, results)


def _empty(result: Tensor | None) -> Tensor | None:
    return None if result is None else torch.empty(result.shape, dtype=result.dtype)


@contextmanager
def skipping() -> Iterator[None]:
    """Skip a test when it would use results."""
    try:
        yield
    except Exception as error:
        pytest.skip(f"compiled only: {type(error).__name__}: {str(error)[:200]}")
