"""The registry's entry for EAGLE3 drafts."""

from __future__ import annotations

from collections.abc import Iterable

from specbuild.builder.families.eagle3.checkpoint import read_eagle3
from specbuild.builder.families.eagle3.config import ARCHITECTURES
from specbuild.builder.families.eagle3.cuda import EAGLE3_CUDA
from specbuild.builder.families.eagle3.model import DraftFuse, Eagle3
from specbuild.builder.families.eagle3.reference import read_reference
from specbuild.builder.families.eagle3.synth import EAGLE3_SYNTH
from specbuild.builder.families.family import DraftFamily

DRAFT_NAMES = ("midlayer.", "fc.weight", "d2t", "t2d")
DRAFT_HINT = "the shards contain an EAGLE3 draft; pass it with --draft, and its target with --model"


def draft_hints(names: Iterable[str]) -> list[str]:
    """Return a hint if the names of tensors are those of a draft."""
    return [DRAFT_HINT] if any(name.startswith(DRAFT_NAMES) for name in names) else []


EAGLE3 = DraftFamily(
    title="EAGLE3",
    architectures=ARCHITECTURES,
    read=read_eagle3,
    hints=draft_hints,
    fuse=DraftFuse,
    draft=Eagle3,
    reference=read_reference,
    synth=EAGLE3_SYNTH,
    cuda=EAGLE3_CUDA,
)
