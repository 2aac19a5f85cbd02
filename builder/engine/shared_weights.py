"""Which weights of an engine are the same bytes, so that they are stored once."""

from __future__ import annotations

import re
from collections.abc import Mapping

from specbuild.builder.graph.passes.weights import Recipe

_LAYER = re.compile(r"\blayers\.\d+\.")


def stored_names(weights: Mapping[str, Recipe]) -> dict[str, str]:
    """For every weight the name that it is stored under: its own, or that of an equal one.

    Weights are equal where layers give the same name to what is made, in one form, of the same
    checkpoint tensors: as in a synthetic model whose layers repeat.
    """
    first: dict[tuple[object, ...], str] = {}
    names = {}
    for name, recipe in weights.items():
        form = (_LAYER.sub("layers.*.", name), recipe.shape, recipe.dtype, recipe.sources)
        names[name] = first.setdefault(form, name) if recipe.sources else name
    return names


def stored_once(weights: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """The weights that the file holds."""
    names = stored_names(weights)
    return {name: recipe for name, recipe in weights.items() if names[name] == name}
