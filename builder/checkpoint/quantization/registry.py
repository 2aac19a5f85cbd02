"""The formats of quantized checkpoints. A new one is a file in this folder and an entry here."""

from __future__ import annotations

from dataclasses import dataclass, field

from specbuild.builder.checkpoint.config_fields import QUANTIZATION
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.quantization.awq import AwqFormat
from specbuild.builder.checkpoint.quantization.bitsandbytes import BitsAndBytesFormat
from specbuild.builder.checkpoint.quantization.compressed_tensors import CompressedTensorsFormat
from specbuild.builder.checkpoint.quantization.fp8 import Fp8Format
from specbuild.builder.checkpoint.quantization.gptq import GptqFormat
from specbuild.builder.checkpoint.quantization.modelopt import ModelOptFormat
from specbuild.builder.checkpoint.quantization.scheme import (
    QuantizationFormat,
    QuantizationScheme,
    read_weights,
)
from specbuild.builder.checkpoint.source import Tensors
from specbuild.runtime.engine_dir.strict_json import brief
from specbuild.runtime.errors import SpecbuildError


@dataclass(frozen=True)
class QuantizationSummary:
    """The report of a checkpoint's quantization.

    ``scheme`` names its method and format. ``activations`` states that engines do not round
    activations, and how the scheme does.
    """

    scheme: str
    activations: str


@dataclass(frozen=True)
class FloatTensors:
    """The tensors of a checkpoint; quantized weights are dequantized when they are loaded.

    ``types`` counts the types in a quantized checkpoint, by kind of tensor.
    """

    tensors: Tensors
    quantization: QuantizationSummary | None
    types: dict[str, dict[str, int]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


FORMATS: tuple[QuantizationFormat, ...] = (
    Fp8Format(),
    CompressedTensorsFormat(),
    AwqFormat(),
    GptqFormat(),
    ModelOptFormat(),
    BitsAndBytesFormat(),
)
# GPT-OSS stores experts in MXFP4, which engines keep, so its family reads them.
_OF_FAMILIES = ("mxfp4",)


def float_tensors(tensors: Tensors, config: Config, *, strict: bool) -> FloatTensors:
    """Return the tensors of a checkpoint, with weights in place of quantized parts.

    Raises SpecbuildError for what is not implemented, and for inconsistent parts.
    """
    scheme = read_scheme(config, strict=strict)
    if scheme is None:
        return FloatTensors(tensors, None)
    read = read_weights(f"{config.where}: {QUANTIZATION}", tensors, scheme)
    rounding = scheme.activations
    activations = f"not rounded (the scheme: {rounding})" if rounding else "not rounded"
    summary = QuantizationSummary(scheme.name, activations)
    return FloatTensors(read.tensors, summary, read.types, read.warnings)


def read_scheme(config: Config, *, strict: bool) -> QuantizationScheme | None:
    """Return the quantization of the checkpoint's weights, or None.

    Raises SpecbuildError for a method or a variant that is not implemented.
    """
    if config.get(QUANTIZATION) is None:
        return None
    section = config.section(QUANTIZATION)
    method = section.text("quant_method")
    if method in _OF_FAMILIES:
        return None
    for known in FORMATS:
        if method in known.methods:
            return known.read(section, strict=strict)
    by_method = f" by {brief(method)}" if method else ""
    names = ", ".join(name for known in FORMATS for name in known.methods)
    raise SpecbuildError(
        f"{config.where}: {QUANTIZATION}: these weights are quantized{by_method}, which is not "
        f"implemented for this model (implemented: {names}); give the checkpoint that they were "
        "quantized from"
    )
