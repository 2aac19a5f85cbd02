"""Reads the latents that may lie beside a checkpoint in place of its keys and values (MLA-lite)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from specbuild.builder.checkpoint.audit import ExpectedTensor, audit, group_names
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.source import FLOAT_DTYPES, SourceTensor, has_file, read_header
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError

LATENT_FILE = "mla_kv.safetensors"
DOWN, UP_KEYS, UP_VALUES = "mla_W_c", "mla_W_k_lat", "mla_W_v_lat"
# A layer with a latent may have this one too: the checkpoint's own, adapted to the latent.
OUTPUT = "o_proj.weight"
_NAME = re.compile(rf"model\.layers\.(\d{{1,6}})\.self_attn\.({DOWN}|{UP_KEYS}|{UP_VALUES})")
_UP_OF = {"k_proj": UP_KEYS, "v_proj": UP_VALUES}


@dataclass(frozen=True)
class Latents:
    """The latent tensors of some layers; ``dims`` [layers] has 0 for the others.

    Among ``tensors`` may be output projections under the names that the checkpoint has, too: the
    latents' take their place.

    ``replaced`` maps the projections that they stand for to the tensors that rebuild these.
    """

    dims: tuple[int, ...]
    tensors: dict[str, SourceTensor]
    replaced: dict[str, str]
    warnings: tuple[str, ...]


def latent_name(layer: int, part: str) -> str:
    """The name of one of a layer's three latent tensors."""
    return f"model.layers.{layer}.self_attn.{part}"


def latent_shapes(g: TargetGeometry, layer: int, dim: int) -> dict[str, tuple[int, ...]]:
    """The latent tensors of a layer by name, where it caches ``dim`` values a token."""
    kv_width = g.kv_heads * g.head_dim
    return {
        latent_name(layer, DOWN): (g.hidden, dim),
        latent_name(layer, UP_KEYS): (dim, kv_width),
        latent_name(layer, UP_VALUES): (dim, kv_width),
    }


def full_rank(g: TargetGeometry) -> int:
    """The rank of a layer's keys and values together: more latent values cannot help."""
    return min(g.hidden, 2 * g.kv_heads * g.head_dim)


def read_latents(path: Path, config: Config, g: TargetGeometry) -> Latents | None:
    """The latents beside the checkpoint at ``path``, or None where there are none to use.

    They are found by the name of their file; ``attention.use_mla_kv`` of the config may switch
    them off, or demand them. Raises SpecbuildError where a layer lacks one of its three tensors,
    or one does not fit the checkpoint or ``attention.mla_latent_dim``.
    """
    section = config.section("attention")
    file = path / LATENT_FILE
    present = has_file(file)
    if not section.boolean("use_mla_kv", present):
        return None
    if not present:
        raise SpecbuildError(
            f"{section.where}: use_mla_kv is true, but {path} has no {LATENT_FILE}; make it with "
            "specbuild retrofit mla, or build with --no-mla"
        )
    tensors, dims = read_latent_file(file, g)
    _check_dims(file, section, dims)
    replaced = {
        f"{latent_name(layer, projection)}.weight": latent_name(layer, up)
        for layer, dim in enumerate(dims)
        if dim
        for projection, up in _UP_OF.items()
    }
    layers = ", ".join(group_names(latent_name(i, DOWN) for i, dim in enumerate(dims) if dim))
    warnings = (
        f"target: {LATENT_FILE} stands in the place of keys and values ({layers}), which changes "
        "the output; --no-mla leaves it out",
    )
    return Latents(dims, tensors, replaced, warnings)


def read_latent_file(
    file: Path, g: TargetGeometry
) -> tuple[dict[str, SourceTensor], tuple[int, ...]]:
    """The tensors of ``file`` and the width of every layer's latent, 0 where it has none.

    Raises SpecbuildError where they do not fit a checkpoint of this geometry.
    """
    tensors = read_header(file)
    dims = _dims(tensors, g)
    _audit(file, tensors, dims, g)
    most = full_rank(g)
    above = [f"layer {layer}: {dim}" for layer, dim in enumerate(dims) if dim > most]
    if above:
        raise SpecbuildError(
            f"{file}: latents of more than the full rank of {most} ({', '.join(above)}); make them "
            "anew with specbuild retrofit mla"
        )
    return tensors, dims


def _dims(tensors: dict[str, SourceTensor], g: TargetGeometry) -> tuple[int, ...]:
    """The width of every layer's latent by whichever of its tensors there is, 0 without any."""
    dims = [0] * g.layers
    for part in (UP_VALUES, UP_KEYS, DOWN):
        for name, tensor in tensors.items():
            match = _NAME.fullmatch(name)
            if match and match[2] == part and int(match[1]) < g.layers and len(tensor.shape) == 2:
                dims[int(match[1])] = tensor.shape[part == DOWN]
    return tuple(dims)


def _audit(
    file: Path, tensors: dict[str, SourceTensor], dims: tuple[int, ...], g: TargetGeometry
) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, dim in enumerate(dims):
        if dim:
            shapes |= latent_shapes(g, layer, dim)
        if dim and latent_name(layer, OUTPUT) in tensors:
            shapes[latent_name(layer, OUTPUT)] = (g.hidden, g.q_heads * g.head_dim)
    expected = {name: ExpectedTensor(shape, FLOAT_DTYPES) for name, shape in shapes.items()}
    hint = (
        f"the latents of a layer are {DOWN}, {UP_KEYS} and {UP_VALUES} (and {OUTPUT} where it was "
        "adapted), made for this checkpoint; make them anew with specbuild retrofit mla, or build "
        "with --no-mla"
    )
    audit(str(file), expected, tensors, [hint])
    if not expected:
        raise SpecbuildError(f"{file}: holds no latents; {hint}")


def _check_dims(file: Path, section: Config, dims: tuple[int, ...]) -> None:
    wanted = section.integers("mla_latent_dim")
    if wanted is None:
        return
    fits = list(wanted) == list(dims) if len(wanted) > 1 else set(dims) <= {0, *wanted}
    if not fits:
        raise section.wrong("mla_latent_dim", f"the widths of the latents in {file}, {list(dims)}")
