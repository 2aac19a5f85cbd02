"""The registry's entry for P-EAGLE drafts."""

from __future__ import annotations

from specbuild.builder.families.eagle3.model import Eagle3
from specbuild.builder.families.eagle3.reference import read_reference
from specbuild.builder.families.family import DraftFamily
from specbuild.builder.families.p_eagle.checkpoint import read_p_eagle
from specbuild.builder.families.p_eagle.config import ARCHITECTURES, is_p_eagle
from specbuild.builder.families.p_eagle.cuda import P_EAGLE_CUDA
from specbuild.builder.families.p_eagle.model import PEagleFuse
from specbuild.builder.families.p_eagle.synth import P_EAGLE_SYNTH

P_EAGLE = DraftFamily(
    title="P-EAGLE",
    architectures=ARCHITECTURES,
    read=read_p_eagle,
    hints=lambda _: [],
    fuse=PEagleFuse,
    draft=Eagle3,
    reference=read_reference,
    synth=P_EAGLE_SYNTH,
    claims=is_p_eagle,
    fused=("hidden", "mask_hidden"),
    cuda=P_EAGLE_CUDA,
    refused_by=frozenset({"tensorrt", "tensorrt-rtx"}),
)
