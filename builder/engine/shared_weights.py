"""Finds weights with equal bytes, which an engine stores once."""

from __future__ import annotations

import re
from collections.abc import Mapping

from specbuild.builder.graph.passes.weights import Recipe

_LAYER = re.compile(r"\blayers\.\d+\.")


def stored_names(weights: Mapping[str, Recipe]) -> dict[str, str]:
    """Return for every weight the name under which it is stored: its own, or an equal one's.

    Weights are equal if layers derive them in the same form from the same checkpoint tensors, for
    example in a synthetic model whose layers repeat.
    """
    first: dict[tuple[object, ...], str] = {}
    names = {}
    for name, recipe in weights.items():
        form = (_LAYER.sub("layers.*.", name), recipe.shape, recipe.dtype, recipe.sources)
        names[name] = first.setdefault(form, name) if recipe.sources else name
    return names


def stored_once(weights: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Return the weights that the file has."""
    names = stored_names(weights)
    return {name: recipe for name, recipe in weights.items() if names[name] == name}
