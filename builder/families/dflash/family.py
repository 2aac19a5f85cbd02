"""The registry's entry for DFlash drafts."""

from __future__ import annotations

from specbuild.builder.families.dflash.checkpoint import read_dflash
from specbuild.builder.families.dflash.config import ARCHITECTURES, is_dflash
from specbuild.builder.families.dflash.cuda import DFLASH_CUDA
from specbuild.builder.families.dflash.model import DFlash, DFlashContext
from specbuild.builder.families.dflash.reference import read_reference
from specbuild.builder.families.dflash.synth import DFLASH_SYNTH
from specbuild.builder.families.family import DraftFamily

DFLASH = DraftFamily(
    title="DFlash",
    architectures=ARCHITECTURES,
    read=read_dflash,
    hints=lambda _: [],
    fuse=None,
    context=DFlashContext,
    draft=DFlash,
    reference=read_reference,
    synth=DFLASH_SYNTH,
    claims=is_dflash,
    cuda=DFLASH_CUDA,
    refused_by=frozenset({"tensorrt-rtx"}),
)
