"""An EAGLE3 draft that was given as a target."""

from __future__ import annotations

from collections.abc import Iterable

DRAFT_NAMES = ("midlayer.", "fc.weight", "d2t", "t2d")
DRAFT_HINT = "the shards hold an EAGLE3 draft; give it with --draft, and its target as --model"


def draft_hints(names: Iterable[str]) -> list[str]:
    """The hint, where the tensors' names are a draft's."""
    return [DRAFT_HINT] if any(name.startswith(DRAFT_NAMES) for name in names) else []
