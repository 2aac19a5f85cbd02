"""A test case of an op in the form of its kernels: bf16 activations and weights."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import torch

from specbuild.plugins_cuda.cases import Case
from specbuild.plugins_cuda.launches import (
    Lowering,
    LoweringRequest,
    Phase,
    Tactic,
    Target,
    TensorInfo,
)
from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.plugins_cuda.registry import all_ops

GPU_ONLY = "gpu: "
# With few multiprocessors each CTA processes several tiles at the sizes of a test.
SMALL_TARGET = Target(multiprocessors=3)

_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.int32: "int32",
          torch.uint8: "uint8"}  # fmt: skip
_BITS = {"bfloat16": np.uint16, "float32": np.float32, "int32": np.int32, "uint8": np.uint8}


@dataclass(frozen=True)
class KernelCase:
    """Inputs and the reference's outputs of a case, as tensors by name."""

    op: OpSpec
    case: Case
    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]

    def request(
        self, phase: Phase, target: Target, tactic: Tactic | None = None
    ) -> LoweringRequest:
        """Return the request for the op's ``lower``."""
        tensors = {
            name: TensorInfo(tuple(t.shape), _NAMES[t.dtype])
            for name, t in (*self.inputs.items(), *self.outputs.items())
        }
        attributes = self.op.complete(self.case.attributes)
        return LoweringRequest(tensors, attributes, phase, target, tactic or {})

    def lowering(self, phase: Phase, target: Target, tactic: Tactic | None = None) -> Lowering:
        """Return the lowering of the case."""
        assert self.op.lower is not None
        return self.op.lower(self.request(phase, target, tactic))

    def check(self, got: Mapping[str, np.ndarray]) -> None:
        """Raise AssertionError if outputs (in the form of :func:`bits`) exceed the tolerance."""
        for name, expected in self.outputs.items():
            if np.array_equal(got[name], bits(expected)):
                continue  # the usual result of large caches
            defined = self.case.compare.get(name, np.s_[:])
            actual = values(got[name], expected.dtype)[defined]
            reference = values(bits(expected), expected.dtype)[defined]
            if expected.dtype in (torch.int32, torch.uint8):
                np.testing.assert_array_equal(actual, reference, err_msg=name)
            else:
                np.testing.assert_allclose(
                    actual, reference, atol=self.case.kernel_atol, rtol=self.case.kernel_rtol,
                    err_msg=name, equal_nan=True,
                )  # fmt: skip


def bits(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as numpy; bf16 as uint16."""
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def values(array: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Convert the result of :func:`bits` to numbers."""
    if dtype == torch.bfloat16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def _tensor(spec: TensorSpec, array: np.ndarray) -> torch.Tensor:
    if spec.dtype in ("T", "C", "W") and array.dtype == np.float32:
        return torch.tensor(array, dtype=torch.bfloat16)
    return torch.tensor(array)


def kernel_case(op: OpSpec, case: Case, device: str = "cpu") -> KernelCase:
    """Draw the case's inputs, round them to the kernels' types, and run the reference.

    The reference runs on ``device``; the tensors of the result are on the CPU.
    """
    arrays = case.make(np.random.default_rng(crc32(f"{op.name} {case.name}".encode())))
    tensors = [
        None if array is None else _tensor(spec, array)
        for spec, array in zip(op.inputs, arrays, strict=True)
    ]
    placed = [None if tensor is None else tensor.to(device) for tensor in tensors]
    with torch.device(device):  # where references create tensors
        results = reference_outputs(op, placed, op.complete(case.attributes))
    results = results if isinstance(results, tuple) else (results,)
    inputs = {s.name: t for s, t in zip(op.inputs, tensors, strict=True) if t is not None}
    outputs = {s.name: t.cpu() for s, t in zip(op.outputs, results, strict=True) if t is not None}
    return KernelCase(op, case, inputs, outputs)


def reference_outputs(
    op: OpSpec, tensors: Sequence[torch.Tensor | None], attributes: Mapping[str, Any]
) -> Any:
    """Run the op's reference; it returns a tensor or a tuple of tensors."""
    return op.reference(*tensors, **attributes)


def kernel_ops() -> list[OpSpec]:
    """Return every op with kernels."""
    return [op for op in all_ops().values() if op.lower is not None]


def phases_of(op: OpSpec) -> tuple[Phase, ...]:
    """Return the phases of an op; ``prefill`` only if the op has kernels for it."""
    package = op.reference.__module__.rpartition(".")[0]
    has_prefill = importlib.util.find_spec(f"{package}.prefill") is not None
    return ("decode", "prefill") if has_prefill or op.name == "PagedTreeAttention" else ("decode",)


def cases_for(op: OpSpec, phase: Phase, *, gpu: bool) -> list[Case]:
    """Return the cases of one phase: the op's cases and those for its kernels only."""
    package = op.reference.__module__.rpartition(".")[0]
    module = importlib.import_module(f"{package}.cases")
    cases = [*module.CASES, *getattr(module, "KERNEL_CASES", ())]
    if phase == "prefill" and importlib.util.find_spec(f"{package}.prefill_cases") is not None:
        cases += importlib.import_module(f"{package}.prefill_cases").KERNEL_CASES
    return [case for case in cases if gpu or not case.name.startswith(GPU_ONLY)]
