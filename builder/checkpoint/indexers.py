"""Reads the indexers that may lie beside a checkpoint (DSA-lite)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from specbuild.builder.checkpoint.audit import ExpectedTensor, audit
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.source import FLOAT_DTYPES, SourceTensor, has_file, read_header
from specbuild.runtime.engine_dir.geometry import IndexerGeometry, TargetGeometry
from specbuild.runtime.errors import SpecbuildError

INDEXER_FILE = "dsa_indexer.safetensors"
QUERIES, KEYS, HEAD_WEIGHTS = "dsa_W_q", "dsa_W_k", "dsa_W_h"
_NAME = re.compile(rf"model\.layers\.(\d{{1,6}})\.self_attn\.({QUERIES}|{KEYS}|{HEAD_WEIGHTS})")
_HINT = (
    f"a full-attention layer has {QUERIES} [hidden, n_idx * d_idx] and {KEYS} [hidden, d_idx], and "
    f"all have {HEAD_WEIGHTS} [hidden, n_idx] or, with one head, none; --no-dsa leaves them out"
)


@dataclass(frozen=True)
class Indexers:
    """The indexers of some full-attention layers, all of one shape."""

    geometry: IndexerGeometry
    tensors: dict[str, SourceTensor]


def indexer_name(layer: int, part: str) -> str:
    """The name of one of a layer's indexer tensors."""
    return f"model.layers.{layer}.self_attn.{part}"


def read_indexers(
    path: Path, config: Config, g: TargetGeometry, *, asked: bool | None
) -> tuple[Indexers | None, tuple[str, ...]]:
    """The indexers beside the checkpoint at ``path`` and warnings; None where none are to be used.

    They are lossy, so that they are used only where ``asked`` says so or, where that is None,
    ``attention.enable_dsa_indexer`` of the config. Raises SpecbuildError where they are to be used
    and are not there, a layer lacks one of its tensors, or one does not fit the checkpoint.
    """
    section = config.section("attention")
    file = path / INDEXER_FILE
    enabled = section.boolean("enable_dsa_indexer", False)
    if not (enabled if asked is None else asked):
        unused = has_file(file) and asked is None
        note = f"target: {INDEXER_FILE} is not used; --dsa attends to the tokens that it chooses"
        return None, (note,) if unused else ()
    if not has_file(file):
        why = "--dsa" if asked else f"{section.where}: enable_dsa_indexer is true"
        raise SpecbuildError(
            f"{why}, but {path} has no {INDEXER_FILE}; give a model with indexers, or build with "
            "--no-dsa"
        )
    tensors = read_header(file)
    geometry = _geometry(file, tensors, section, g)
    warning = (
        f"target: {INDEXER_FILE} chooses the tokens that {len(geometry.layers)} layers attend to "
        "in long contexts, which changes the output; --no-dsa leaves it out"
    )
    return Indexers(geometry, tensors), (warning,)


def _geometry(
    file: Path, tensors: dict[str, SourceTensor], section: Config, g: TargetGeometry
) -> IndexerGeometry:
    shapes: dict[tuple[int, str], tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match and int(match[1]) < g.layers and len(tensor.shape) == 2:
            shapes[int(match[1]), match[2]] = tensor.shape
    if not shapes:
        raise SpecbuildError(f"{file}: holds no indexers; {_HINT}")
    layers = tuple(sorted({layer for layer, _ in shapes}))
    windowed = [i for i in layers if g.layer_types[i] != "full_attention"]
    if windowed:
        raise SpecbuildError(
            f"{file}: layers {', '.join(map(str, windowed))} have a window, which is all that they "
            f"attend to; {_HINT}"
        )
    width = _first(shapes, KEYS) or _first(shapes, QUERIES) or 1
    heads = max(1, (_first(shapes, QUERIES) or width) // width)
    weighted = heads > 1 or _first(shapes, HEAD_WEIGHTS) is not None
    found = IndexerGeometry(
        layers=layers,
        heads=heads,
        width=width,
        weighted=weighted,
        top_k=section.optional_integer("dsa_top_k"),
        threshold=_optional_threshold(section),
    )
    expected = {
        name: ExpectedTensor(shape, FLOAT_DTYPES)
        for name, shape in indexer_shapes(g, found).items()
    }
    audit(str(file), expected, tensors, [_HINT])
    return found


def indexer_shapes(g: TargetGeometry, indexer: IndexerGeometry) -> dict[str, tuple[int, ...]]:
    """The tensors of indexers by name."""
    sizes = {QUERIES: indexer.heads * indexer.width, KEYS: indexer.width}
    sizes |= {HEAD_WEIGHTS: indexer.heads} if indexer.weighted else {}
    return {
        indexer_name(layer, part): (g.hidden, size)
        for layer in indexer.layers
        for part, size in sizes.items()
    }


def _first(shapes: dict[tuple[int, str], tuple[int, ...]], part: str) -> int | None:
    """The columns of the first layer's tensor of this kind."""
    found = sorted((layer, shape[1]) for (layer, name), shape in shapes.items() if name == part)
    return found[0][1] if found else None


def _optional_threshold(section: Config) -> int | None:
    given = section.get("dsa_threshold") is not None
    return section.integer("dsa_threshold", least=0) if given else None
