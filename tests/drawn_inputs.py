"""Check that ops can compute with the inputs that ``tune`` draws for an engine's shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from specbuild.builder.backends.cuda.compile.nvrtc import target_of
from specbuild.builder.backends.cuda.plan.plan_reader import ReadPlan
from specbuild.builder.backends.cuda.tuning.choice import shapes_of
from specbuild.builder.backends.cuda.tuning.inputs import LaunchData, contexts_for

GPU = "sm_90a"


def drawn_ops(found: ReadPlan) -> set[str]:
    """Return the ops whose inputs give finite results and have no index out of range."""
    seen = set()
    for shape in shapes_of(found, target_of(GPU)):
        if (shape.layer, shape.request.phase) in seen:
            continue
        seen.add((shape.layer, shape.request.phase))
        request = shape.request
        for context in contexts_for(request, 9):
            data = LaunchData(request, context, np.random.default_rng(1))
            names = [spec.name for spec in shape.op.inputs if spec.name in request.tensors]
            arrays = data.arrays(names)
            inputs = [
                as_tensor(arrays[spec.name], request.tensors[spec.name].dtype)
                if spec.name in arrays
                else None
                for spec in shape.op.inputs
            ]
            for name, array in arrays.items():
                pool = name.endswith("_pool")
                assert array.shape[pool:] == request.tensors[name].shape[pool:], name
                assert len(np.unique(array)) > 1 or array.size < 4 or not array.any(), name
            results: Any = shape.op.reference(*inputs, **request.attributes)
            results = results if isinstance(results, tuple) else (results,)
            assert all(result.float().isfinite().all() for result in results), shape.layer
    return {layer.split()[0] for layer, _ in seen}


def as_tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
