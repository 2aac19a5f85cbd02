"""MTP layers as the registry knows them."""

from __future__ import annotations

from specbuild.builder.families.family import DraftFamily
from specbuild.builder.families.mtp.checkpoint import ARCHITECTURES, read_mtp
from specbuild.builder.families.mtp.model import FinalNorm, Mtp

MTP = DraftFamily(
    title="MTP",
    architectures=ARCHITECTURES,
    read=read_mtp,
    hints=lambda _: [],
    fuse=FinalNorm,
    draft=Mtp,
)
