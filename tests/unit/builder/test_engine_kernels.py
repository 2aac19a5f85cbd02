"""Kernels of complete GPT-OSS engines: every launch at real sizes compiles without spills.

``test_default_kernels.py`` compiles ops at selected sizes. Here the sizes are those of an engine's
programs: every batch bucket of up to 64 sequences, every prompt chunk, and shipped tactics.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from specbuild.builder import graphs
from specbuild.builder.backends.backend import PortableGraphs
from specbuild.builder.backends.cuda.backend import CUDA, fused_model
from specbuild.builder.backends.cuda.compile.nvrtc import Compiled, Compiler, target_of
from specbuild.builder.backends.cuda.engine import lower_engine
from specbuild.builder.backends.cuda.tactics.call_lowering import CallLowering
from specbuild.builder.inputs import settled_inputs
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.model import SynthModel
from specbuild.builder.synth.options import SynthOptions
from specbuild.plugins_cuda.launches import Kernel

GEOMETRIES = ("gpt-oss-20b", "gpt-oss-120b")
# A DFlash draft reads the states of this many layers. More layers launch the same kernels.
LAYERS = 8
LONG = {"max_seq_len": 131072}
# A step's rows hold the trees of all sequences and SpecPV's buffer.
SPECPV = {"specpv": True, "max_batch_size": 16, **LONG}
# A draft's kind and the options of a build.
ENGINES: Mapping[str, tuple[str | None, Mapping[str, Any]]] = {
    "plain": (None, {}),
    "long": (None, LONG),
    "suffix": (None, {"drafter": "suffix"}),
    "weights-fp8": (None, {"weights_dtype": "fp8"}),
    "weights-mxfp4": (None, {"weights_dtype": "mxfp4"}),
    "cache-fp8": ("eagle3", {"kv_dtype": "fp8"}),
    "screened-head": ("eagle3", {"prefilter_head": True}),
    "eagle3-fp8": ("eagle3", {"draft_dtype": "fp8"}),
    "eagle3-mxfp4": ("eagle3", {"draft_dtype": "mxfp4"}),
    "eagle3-tree": ("eagle3", {"draft_top_k": 4, "draft_depth": 5, "draft_tokens": 15}),
    "p-eagle": ("p-eagle", {}),
    "dflash": ("dflash", {}),
    "specpv": ("eagle3", SPECPV),
}


@cache
def compiler() -> Compiler:
    """Shared by the tests, since engines have most kernels in common."""
    return Compiler("sm_90a")


def engine_kernels(geometry: str, name: str) -> tuple[Kernel, ...]:
    """Return the kernels of an engine's programs, without creating weights."""
    kind, options = ENGINES[name]
    draft = {} if kind is None else {"draft_kind": kind, "acceptance": 0.7}
    model = SynthModel(SynthOptions(geometry=geometry, layers=LAYERS, **draft))  # type: ignore[arg-type]
    options = {"max_batch_size": 64, **options}
    build_options = BuildOptions.from_flat(
        model=Path(geometry), output=Path("unused"), backend="cuda", **options
    )
    silent, arguments = SilentProgress(), CUDA.options(build_options)
    inputs = settled_inputs(build_options, CUDA, model.checkpoints())
    exported = graphs.export_graphs(inputs.sources, inputs.engine_sizes, silent)
    portable = PortableGraphs(exported, inputs.engine_sizes, inputs.sources)
    fused, _ = fused_model(portable, arguments, silent)
    target = target_of(arguments.gpu)
    lowered = lower_engine(
        fused, inputs.engine_sizes, target, CallLowering(target, arguments.tactics)
    )
    return tuple(lowered.writer.kernels)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_no_kernel_of_an_engine_spills(geometry: str, name: str) -> None:
    kernels = engine_kernels(geometry, name)
    assert any(kernel.hot for kernel in kernels)
    compiled = compiler().compile(kernels, lambda: None)
    assert isinstance(compiled, Compiled), compiled.reason
