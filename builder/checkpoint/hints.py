"""Known ways in which a configuration and its shards do not belong together, in any family."""

from __future__ import annotations

import re
from collections.abc import Collection

from specbuild.runtime.engine_dir.geometry import TargetGeometry

# Parts of quantized weights in any format.
_QUANTIZED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight.absmax")
LAYER = re.compile(r"(?:model\.layers|block)\.(\d{1,6})\.")


def layer_hints(g: TargetGeometry, names: Collection[str]) -> list[str]:
    """That the shards hold another number of layers, or weights that only scales make numbers."""
    hints = []
    numbers = {int(match[1]) for match in map(LAYER.match, names) if match}
    if numbers and max(numbers) + 1 != g.layers:
        hints.append(f"the shards hold {max(numbers) + 1} layers, config.json says {g.layers}")
    if any(name.endswith(_QUANTIZED) for name in names):
        hints.append(
            "the shards hold quantized weights that no quantization_config in config.json describes"
        )
    return hints
