"""The registry's entry for MTP layers."""

from __future__ import annotations

from specbuild.builder.families.family import DraftFamily
from specbuild.builder.families.mtp.checkpoint import read_mtp
from specbuild.builder.families.mtp.cuda import MTP_CUDA
from specbuild.builder.families.mtp.model import Mtp
from specbuild.builder.families.mtp.naming import DEEPSEEK, NAMINGS
from specbuild.builder.families.mtp.reference import read_reference
from specbuild.builder.families.mtp.synth import MTP_SYNTH
from specbuild.builder.families.parts.draft_modules import FinalNorm

MTP = DraftFamily(
    title="MTP",
    architectures=tuple(naming.architecture for naming in (DEEPSEEK, *NAMINGS.values())),
    read=read_mtp,
    hints=lambda _: [],
    fuse=FinalNorm,
    draft=Mtp,
    reference=read_reference,
    synth=MTP_SYNTH,
    cuda=MTP_CUDA,
    in_target=True,
)
