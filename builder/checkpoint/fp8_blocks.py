"""FP8 weights with a scale for every block (DeepSeek-V3), read as fp32 a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from specbuild.builder.checkpoint.config_fields import FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.source import FLOAT_DTYPES, SourceTensor
from specbuild.runtime.errors import SpecbuildError

SECTION = "quantization_config"
SCALE = "_scale_inv"
STORED = "F8_E4M3"

# As DeepSeek writes the section (fmt), and as transformers does (modules_to_not_convert). How
# activations are rounded is no matter of the weights: engines do not round them.
_FIELDS = FieldTable(
    read=frozenset({"weight_block_size"}),
    only={"quant_method": ("fp8",), "fmt": ("e4m3",)},
    inert=frozenset(
        {
            "activation_scheme",
            "dequantize",
            "ignored_layers",
            "modules_to_convert",
            "modules_to_not_convert",
            "scale_fmt",
        }
    ),
)

Block = tuple[int, int]


def check_fp8(config: Config, *, strict: bool) -> tuple[str, ...]:
    """Warnings for the fields of ``quantization_config``.

    Raises SpecbuildError for another quantisation than FP8 in blocks.
    """
    if config.get(SECTION) is None:
        return ()
    section = config.section(SECTION)
    if section.text("quant_method") != "fp8":
        raise section.wrong("quant_method", "'fp8', or no quantization_config")
    _block(section)
    return check_fields(section, _FIELDS, strict=strict)


def dequantised(tensors: dict[str, SourceTensor], config: Config) -> dict[str, SourceTensor]:
    """The tensors with FP8 weights times their scales, fp32, each made when it is loaded.

    ``X.weight`` [rows, columns] has ``X.weight_scale_inv`` with a value for every block, those at
    the edges cut off. Raises SpecbuildError for a weight or a scale without the other, and for a
    scale of another shape.
    """
    if config.get(SECTION) is None:
        return tensors
    block = _block(config.section(SECTION))
    made = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALE)}
    for name, tensor in made.items():
        if tensor.dtype == STORED:
            made[name] = _dequantised(tensor, tensors.get(f"{name}{SCALE}"), block)
    for name in tensors.keys() - made.keys():
        weight = tensors.get(name.removesuffix(SCALE))
        if weight is None or weight.dtype != STORED:
            found = "is not there" if weight is None else f"is {weight.dtype}"
            raise SpecbuildError(
                f"{tensors[name].file}: {name} scales {name.removesuffix(SCALE)}, which {found}; "
                "download the checkpoint again"
            )
    return made


def _block(section: Config) -> Block:
    sizes = section.integers("weight_block_size")
    if sizes is None or len(sizes) != 2 or min(sizes) < 1:
        raise section.wrong("weight_block_size", "the rows and columns of a block, [128, 128]")
    return sizes[0], sizes[1]


def _dequantised(weight: SourceTensor, scale: SourceTensor | None, block: Block) -> SourceTensor:
    if scale is None:
        raise SpecbuildError(
            f"{weight.file}: {weight.name} is {STORED}, but its scales {weight.name}{SCALE} are "
            "not there; download the checkpoint again"
        )
    rows, columns = weight.shape if len(weight.shape) == 2 else (0, 0)
    wanted = (-(-rows // block[0]), -(-columns // block[1]))
    if not rows or scale.shape != wanted or scale.dtype not in FLOAT_DTYPES:
        raise SpecbuildError(
            f"{scale.file}: {scale.name} is {scale.dtype} {list(scale.shape)}, but {weight.name} "
            f"{list(weight.shape)} in blocks of {block[0]} x {block[1]} has float scales "
            f"{list(wanted)}; download the checkpoint again"
        )
    return replace(
        weight,
        dtype="F32",
        sources=(*weight.sources, *scale.sources),
        load=partial(_load, weight.load, scale.load, block),
        file=None,
        offset=None,
    )


def _load(
    weight: Callable[[], torch.Tensor], scale: Callable[[], torch.Tensor], block: Block
) -> torch.Tensor:
    """fp32, a row of blocks after the other: beside the result there is only one row of them."""
    codes, factors = weight(), scale().float()
    columns = codes.shape[1]
    whole = torch.empty(codes.shape, dtype=torch.float32)
    for place, factor in enumerate(factors):
        rows = slice(place * block[0], (place + 1) * block[0])
        whole[rows] = codes[rows]
        whole[rows] *= factor.repeat_interleave(block[1])[:columns]
    return whole
