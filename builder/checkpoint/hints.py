"""Known ways in which a configuration and its shards do not belong together, in any family."""

from __future__ import annotations

import re
from collections.abc import Iterable

from specbuild.runtime.engine_dir.geometry import TargetGeometry

LAYER = re.compile(r"(?:model\.layers|block)\.(\d{1,6})\.")


def layer_hints(g: TargetGeometry, names: Iterable[str]) -> list[str]:
    """That the shards hold another number of layers."""
    numbers = {int(match[1]) for match in map(LAYER.match, names) if match}
    if numbers and max(numbers) + 1 != g.layers:
        return [f"the shards hold {max(numbers) + 1} layers, config.json says {g.layers}"]
    return []
