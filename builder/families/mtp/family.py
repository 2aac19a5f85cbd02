"""MTP layers as the registry knows them."""

from __future__ import annotations

from specbuild.builder.families.family import DraftFamily
from specbuild.builder.families.mtp.checkpoint import read_mtp
from specbuild.builder.families.mtp.model import FinalNorm, Mtp
from specbuild.builder.families.mtp.naming import DEEPSEEK, NAMINGS
from specbuild.builder.families.mtp.synth import MTP_SYNTH

MTP = DraftFamily(
    title="MTP",
    architectures=tuple(naming.architecture for naming in (DEEPSEEK, *NAMINGS.values())),
    read=read_mtp,
    hints=lambda _: [],
    fuse=FinalNorm,
    draft=Mtp,
    synth=MTP_SYNTH,
)
