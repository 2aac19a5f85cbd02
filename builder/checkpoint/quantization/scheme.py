"""The interface of a format of quantized checkpoints, and its conversion to weights."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.quantization.tensor import (
    QuantizedForm,
    QuantizedSource,
    QuantizedTensor,
)
from specbuild.builder.checkpoint.source import DTYPE_BITS, SourceTensor, Tensors, shorten
from specbuild.runtime.errors import SpecbuildError

# The tensors of one module by the suffix of their name.
Parts = Mapping[str, SourceTensor]
WEIGHT = "weight"
# Suffixes that only matter for rounding of activations, attention's operands and KV caches.
_ACTIVATION_PARTS = frozenset({"input_scale", "input_global_scale", "input_zero_point",
                               "activation_scale", "output_scale"})  # fmt: skip
_CACHE_PARTS = frozenset({"k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point",
                          "kv_scale", "prob_scale"})  # fmt: skip
_MAX_DOTS = 3
_NUMBER = re.compile(r"(?<=\.)\d{1,6}(?=\.)")
# Types of weights that need scales.
_CODES = frozenset({"F8_E4M3", "F8_E5M2", "I8", "U8", "I32", "F4"})


class QuantizationFormat(Protocol):
    """One storage of quantized weights, named by ``quant_method``."""

    @property
    def methods(self) -> tuple[str, ...]:
        """The values of ``quant_method``."""
        ...

    @property
    def stored(self) -> Mapping[str, str]:
        """The storage types of weights, for documents, with the bits per weight."""
        ...

    def read(self, section: Config, *, strict: bool) -> QuantizationScheme:
        """Read ``quantization_config``.

        Raises SpecbuildError for a variant that is not implemented.
        """
        ...


@dataclass(frozen=True)
class QuantizationScheme:
    """The storage of the weights of one checkpoint.

    ``parts`` are the names, within a module, of tensors that only quantized weights have. ``read``
    returns the weight of a module, by its name and tensors; its :attr:`SourceTensor.load` returns
    the dequantized numbers in fp32. ``excludes`` returns whether the configuration excludes a
    module. ``activations`` describes the rounding of activations, empty for none. ``has_weights``
    is false if only activations or caches are quantized.
    """

    name: str
    parts: frozenset[str]
    read: Callable[[str, Parts], SourceTensor]
    excludes: Callable[[str], bool]
    activations: str = ""
    warnings: tuple[str, ...] = ()
    has_weights: bool = True


@dataclass(frozen=True)
class ReadWeights:
    """``types`` counts the types of tensors in the checkpoint, by their kind."""

    tensors: Tensors
    types: dict[str, dict[str, int]]
    warnings: tuple[str, ...]


def read_weights(where: str, tensors: Tensors, scheme: QuantizationScheme) -> ReadWeights:
    """Return the tensors, with weights in place of their stored parts.

    ``where`` names the configuration in errors. Raises SpecbuildError if no weight is quantized, or
    parts are inconsistent.
    """
    made: Tensors = {}
    modules: dict[str, Tensors] = {}
    unread: Counter[str] = Counter()
    for name, tensor in tensors.items():
        module, part = _split(name, scheme.parts)
        if part:
            modules.setdefault(module, {})[part] = tensor
        elif (last := name.rpartition(".")[2]) in _ACTIVATION_PARTS | _CACHE_PARTS:
            unread[last] += 1
        else:
            made[name] = tensor
    for name, tensor in made.items():
        module = name.removesuffix(f".{WEIGHT}")
        if module != name and (module in modules or tensor.dtype in _CODES):
            modules.setdefault(module, {})[WEIGHT] = tensor
    if not modules and scheme.has_weights:
        raise SpecbuildError(
            f"{where}: the weights are quantized by {scheme.name}, but no tensor is stored "
            "quantized; remove the section if the weights are floats"
        )
    for module, parts in modules.items():
        weight = scheme.read(module, parts)
        made[weight.name] = weight
    contradicted = [module for module in modules if scheme.excludes(module)]
    warnings = (*_warnings(scheme, unread), *_contradiction(contradicted))
    return ReadWeights(made, _types(made, modules, scheme.name), warnings)


def drop_zero_biases(tensors: Tensors, expected: Container[str]) -> tuple[str, ...]:
    """Remove zero biases of quantized modules that the model does not have; return a warning.

    GPTQ's writers give every quantized module a bias.
    """
    ending = ".bias"
    zeros = [
        name
        for name, tensor in tensors.items()
        if name.endswith(ending)
        and name not in expected
        and (weight := tensors.get(f"{name.removesuffix(ending)}.{WEIGHT}")) is not None
        and weight.sources != (weight.name,)
        and not tensor.load().any()
    ]
    for name in zeros:
        del tensors[name]
    if not zeros:
        return ()
    return (f"target: {len(zeros)} biases of quantized layers are zero and were left out",)


def _types(tensors: Tensors, modules: Container[str], scheme: str) -> dict[str, dict[str, int]]:
    """Count tensors by type, and by their names with ``N`` for numbers."""
    found: dict[str, Counter[str]] = {}
    for name, tensor in tensors.items():
        is_read = name.removesuffix(f".{WEIGHT}") in modules
        stored = scheme if is_read else tensor.dtype
        if tensor.quantized is not None:
            stored = tensor.quantized.form.name
        found.setdefault(_NUMBER.sub("N", name), Counter())[stored] += 1
    return {kind: dict(found[kind].most_common()) for kind in sorted(found)}


def quantized_weight(
    module: str,
    parts: Parts,
    form: QuantizedForm,
    shape: tuple[int, int],
    load: Callable[[], QuantizedTensor],
) -> SourceTensor:
    """Return the weight [N, K] of a module, which ``load`` reads from ``parts``."""

    def values(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return load().dequantize(dtype)

    return SourceTensor(
        name=f"{module}.{WEIGHT}",
        dtype="F32",
        shape=shape,
        sources=tuple(part.name for part in parts.values()),
        load=values,
        file=None,
        offset=None,
        load_as=values,
        quantized=QuantizedSource(form, load),
    )


def part_bytes(parts: Parts) -> int:
    """Return the bytes that a checkpoint stores for the parts."""
    return sum(math.prod(p.shape) * DTYPE_BITS[p.dtype] // 8 for p in parts.values())


def required(module: str, parts: Parts, *names: str) -> list[SourceTensor]:
    """Return the parts with these names. SpecbuildError if one is missing."""
    lacking = [name for name in names if name not in parts]
    if lacking:
        there = next(iter(parts.values()))
        raise SpecbuildError(
            f"{there.file}: {there.name} belongs to a quantized weight, but {module}.{lacking[0]} "
            "is not there; download the checkpoint again"
        )
    return [parts[name] for name in names]


def misfit(part: SourceTensor, expected: str) -> SpecbuildError:
    """Return the error for a part with another type or shape than the others require."""
    return SpecbuildError(
        f"{part.file}: {part.name} is {part.dtype} {list(part.shape)}, expected {expected}; "
        "download the checkpoint again"
    )


def _split(name: str, parts: frozenset[str]) -> tuple[str, str]:
    """Return a tensor's module and part; the part is empty if it is none of ``parts``."""
    pieces = name.split(".")
    for dots in range(1, min(_MAX_DOTS, len(pieces) - 1) + 1):
        part = ".".join(pieces[-dots:])
        if part in parts:
            return ".".join(pieces[:-dots]), part
    return name, ""


def _warnings(scheme: QuantizationScheme, unread: Counter[str]) -> list[str]:
    said = list(scheme.warnings)
    activations = {name: n for name, n in unread.items() if name in _ACTIVATION_PARTS}
    if scheme.activations or activations:
        how = f" ({scheme.activations})" if scheme.activations else ""
        left = "".join(f"; {n} tensors *.{name} are not used" for name, n in activations.items())
        said.append(
            f"target: {scheme.name} rounds activations{how}; engines keep the weights exactly and "
            f"do not round activations{left}"
        )
    caches = [f"*.{name}" for name in sorted(unread) if name in _CACHE_PARTS]
    if caches:
        said.append(f"target: scales of quantized KV caches ({', '.join(caches)}) are not used")
    return said


def _contradiction(modules: list[str]) -> list[str]:
    if not modules:
        return []
    return [
        f"target: quantization_config leaves out {shorten(sorted(modules))}, which the checkpoint "
        "stores quantized; the stored values are used"
    ]
