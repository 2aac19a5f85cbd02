"""Tensors under Hugging Face's names, computed from a GGUF file's when loaded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from specbuild.builder.checkpoint.gguf.blocks import is_quantised
from specbuild.builder.checkpoint.gguf.container import GgufTensor
from specbuild.builder.checkpoint.gguf.values import (
    part,
    quantized_form,
    read_quantized,
    read_values,
    stored_dtype,
)
from specbuild.builder.checkpoint.quantization.tensor import QuantizedSource
from specbuild.builder.checkpoint.source import SourceTensor, Tensors

_MATRIX_AXES = 2
_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class Layers:
    """A file's tensors: those of layers by the name after ``blk.N.``, and the others."""

    outer: dict[str, GgufTensor]
    layers: dict[int, dict[str, GgufTensor]]


def by_layer(tensors: Mapping[str, GgufTensor]) -> Layers:
    """Sort the tensors of a file."""
    outer: dict[str, GgufTensor] = {}
    layers: dict[int, dict[str, GgufTensor]] = {}
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        if match:
            layers.setdefault(int(match[1]), {})[match[2]] = tensor
        else:
            outer[name] = tensor
    return Layers(outer, layers)


def types_by_kind(tensors: Mapping[str, GgufTensor]) -> dict[str, dict[str, int]]:
    """Count tensors by type and name, with ``blk.N.`` for every layer."""
    found: dict[str, Counter[str]] = {}
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        kind = f"blk.N.{match[2]}" if match else name
        found.setdefault(kind, Counter())[tensor.kind.name] += 1
    return {kind: dict(found[kind].most_common()) for kind in sorted(found)}


def renamed(found: Mapping[str, GgufTensor], prefix: str, names: Mapping[str, str]) -> Tensors:
    """Return every tensor unchanged, under ``prefix`` and its name by ``names``.

    These map full names or, without ``.weight`` and ``.bias``, stems. Tensors in neither form keep
    their names in the file, which the audit reports.
    """
    made: Tensors = {}
    for given, tensor in found.items():
        stem, _, ending = given.rpartition(".")
        known = names.get(given) or (f"{names[stem]}.{ending}" if stem in names else None)
        name = tensor.name if known is None else f"{prefix}{known}"
        made[name] = as_it_is(name, tensor)
    return made


def outer_tensors(found: Mapping[str, GgufTensor]) -> Tensors:
    """Return embedding, last norm and head."""
    return renamed(found, "", _OUTER)


def as_it_is(name: str, tensor: GgufTensor) -> SourceTensor:
    """Return the tensor under another name."""
    return rows_of(name, tensor, lambda rows: rows)


def rows_of(
    name: str, tensor: GgufTensor, select: Callable[[torch.Tensor], torch.Tensor]
) -> SourceTensor:
    """Return the tensor with its rows in another order; ``select`` permutes the first axis."""
    made = made_of(name, [tensor], tensor.shape, select)
    if not is_quantised(tensor.kind.name) or len(tensor.shape) != _MATRIX_AXES:
        return made
    count = tensor.shape[0]
    source = QuantizedSource(quantized_form(tensor), partial(read_quantized, tensor))
    return replace(made, quantized=source.select_rows(select(torch.arange(count)), count))


def made_of(
    name: str,
    parents: Sequence[GgufTensor],
    shape: tuple[int, ...],
    make: Callable[..., torch.Tensor],
) -> SourceTensor:
    """Return ``make`` applied to the parents' numbers, in fp32 if their types differ."""
    dtypes = {stored_dtype(parent) for parent in parents}
    alike = len(dtypes) == 1

    def load() -> torch.Tensor:
        wanted = None if alike else torch.float32
        return make(*(read_values(parent, wanted) for parent in parents))

    def load_as(dtype: torch.dtype) -> torch.Tensor:
        return make(*(read_values(parent, dtype) for parent in parents))

    return SourceTensor(
        name=name,
        dtype=dtypes.pop() if alike else "F32",
        shape=shape,
        sources=tuple(parent.name for parent in parents),
        load=load,
        file=parents[0].file,
        offset=None,
        load_as=load_as,
    )


def single_experts(name: str, stacked: GgufTensor) -> Tensors:
    """Return the experts stacked in one tensor [E, out, in]; ``{}`` in ``name`` is their number."""
    return {
        name.format(expert): as_it_is(name.format(expert), part(stacked, expert))
        for expert in range(stacked.shape[0])
    }
