"""torch custom ops derived from the declarations: ``torch.ops.specbuild.<Name>``.

They exist for export. The real implementation is the op's reference; the fake one derives shapes
from the axis names of the declaration. Training calls references directly.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from specbuild.plugins_cuda.opspec import DOMAIN, OpSpec, TensorSpec
from specbuild.plugins_cuda.registry import all_ops

_ATTRIBUTE_TYPES = {int: "int", float: "float", str: "str"}
_FIXED_DTYPES = {"float32": torch.float32, "int32": torch.int32}


def torch_schema(op: OpSpec) -> str:
    """Return the signature for ``torch.library``: tensors by position, attributes by keyword."""
    tensors = [f"Tensor{'?' if t.optional else ''} {t.name}" for t in op.inputs]
    attributes = []
    for a in op.attributes:
        default = "" if a.default is None else f"={a.default!r}".replace("'", '"')
        attributes.append(f"{_ATTRIBUTE_TYPES[a.type]} {a.name}{default}")
    keywords = ["*", *attributes] if attributes else []
    outputs = ", ".join("Tensor" for _ in op.outputs)
    return f"({', '.join([*tensors, *keywords])}) -> ({outputs})"


def fake_outputs(op: OpSpec, tensors: tuple[torch.Tensor | None, ...]) -> Any:
    """Return empty outputs with the shapes that the axis names imply.

    The size of an axis that no input names depends on data: it is a fresh dynamic size. Raises
    ValueError if two tensors give an axis different sizes.
    """
    sizes: dict[str, Any] = {}
    dtypes: dict[str, torch.dtype] = {"T": torch.float32, **_FIXED_DTYPES}
    for spec, tensor in zip(op.inputs, tensors, strict=True):
        if tensor is None:
            continue
        if spec.dtype in ("T", "C"):
            dtypes[spec.dtype] = tensor.dtype
        for axis, size in zip(spec.axes, tensor.shape, strict=not spec.rank_free):
            known = sizes.setdefault(axis, size)
            if isinstance(known, int) and isinstance(size, int) and known != size:
                raise ValueError(f"{op.name}.{spec.name}: axis {axis} is {size}, was {known}")

    def size_of(axis: str) -> Any:
        if axis.isdigit():
            return int(axis)
        if axis not in sizes:
            sizes[axis] = torch.library.get_ctx().new_dynamic_size()
        return sizes[axis]

    def empty(spec: TensorSpec) -> torch.Tensor:
        shape = [size_of(axis) for axis in spec.axes]
        device = next(t.device for t in tensors if t is not None)
        return torch.empty(shape, dtype=dtypes[spec.dtype], device=device)

    outputs = tuple(empty(spec) for spec in op.outputs)
    return outputs[0] if len(outputs) == 1 else outputs


@cache
def register_torch_ops() -> None:
    """Define every op under ``torch.ops.specbuild``, once per process."""
    for op in all_ops().values():
        _register(op)


def _register(op: OpSpec) -> None:
    def real(*tensors: torch.Tensor | None, **attributes: Any) -> Any:
        return op.reference(*tensors, **op.complete(attributes))

    def fake(*tensors: torch.Tensor | None, **_: Any) -> Any:
        return fake_outputs(op, tensors)

    name = f"{DOMAIN}::{op.name}"
    torch.library.custom_op(name, real, mutates_args=(), schema=torch_schema(op)).register_fake(
        fake
    )


def torch_op(name: str) -> Any:
    """Return the callable ``torch.ops.specbuild.<name>``; registers the ops on first use."""
    register_torch_ops()
    return getattr(torch.ops.specbuild, name)
