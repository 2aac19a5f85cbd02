"""The ``tensorrt`` backend: models become engines of plugins, other roles become launches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from specbuild.builder.backends.backend import (
    MODEL_ROLES,
    Lowered,
    PortableGraphs,
    run_role_passes,
)
from specbuild.builder.backends.cuda.check import require_cuda_support
from specbuild.builder.backends.cuda.compile.nvrtc import Compiler, target_of
from specbuild.builder.backends.cuda.gpus import supported_gpu
from specbuild.builder.backends.cuda.lowering import cuda_passes
from specbuild.builder.backends.cuda.options import KernelBackendOptions, tactics_of
from specbuild.builder.backends.cuda.sizes import SIZES as CUDA_SIZES
from specbuild.builder.backends.cuda.tactics.call_lowering import CallLowering, without_spills
from specbuild.builder.backends.tensorrt.options import built_for, require_tensorrt_options
from specbuild.builder.backends.tensorrt.plugins.engine import (
    PluginEngine,
    compile_roles,
    lower_roles,
)
from specbuild.builder.backends.tensorrt.plugins.engine_files import build_plugin_engines
from specbuild.builder.backends.unlowered_parts import require_lowered_parts
from specbuild.builder.engine.sizes import EngineSizes
from specbuild.builder.families.registry import draft_family
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import Progress
from specbuild.plugins_cuda.launches import Unsupported
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError

# Unlike in CUDA engines, some layers can cache latents while others cache keys and values.
# Launches have the rows of a profile, so chains that only guides need would limit the batch.
SIZES = replace(CUDA_SIZES, one_form=False, guide_chain=0)


class PluginBackend:
    """See :class:`Backend`."""

    facts = facts_of("tensorrt")
    sizes = SIZES
    activations = torch.bfloat16

    def options(self, requested: BuildOptions) -> KernelBackendOptions:
        """See :class:`Backend`."""
        require_tensorrt_options(requested)
        device = built_for(requested)
        refuse_foreign_options(requested)
        gpu = supported_gpu(requested.gpu)
        return KernelBackendOptions(requested, device, gpu, tactics_of(requested, gpu))

    def check(
        self,
        requested: BuildOptions,  # noqa: ARG002
        target: TargetGeometry,
        draft: DraftGeometry | None,
    ) -> None:
        """See :class:`Backend`."""
        if target.gated_delta is not None:
            require_lowered_parts(target, "TensorRT plugins")
        require_cuda_support(target, draft)
        family = None if draft is None else draft_family(draft.architecture)
        if family is not None and self.facts.name in family.refused_by:
            raise SpecbuildError(
                f"the draft is a {family.title} draft, which TensorRT engines do not support; "
                "build with --backend cpu or cuda"
            )

    def check_engine_sizes(self, engine_sizes: EngineSizes) -> tuple[str, ...]:
        """See :class:`Backend`."""
        refuse_lists(engine_sizes, self.facts.name)
        return ()

    def lower(
        self, graphs: PortableGraphs, options: KernelBackendOptions, progress: Progress
    ) -> Lowered:
        """See :class:`Backend`; ``build_tensorrt`` compiles the engines with TensorRT."""
        models, draft = graphs.models, graphs.sources.draft_geometry
        dtype = (draft.dtype if draft is not None else None) or SIZES.draft_dtype
        fused = {role: models[role] for role in MODEL_ROLES if role in models}
        target_geometry = graphs.sources.target_geometry
        passes_of = partial(
            cuda_passes,
            draft_dtype=dtype,
            weights_dtype=target_geometry.dtype or "bf16",
            tied=target_geometry.tied_head,
        )
        passes = run_role_passes(fused, passes_of, options.requested.dump_passes, progress)
        compiler = Compiler(options.gpu)

        def compile_with(lowering: CallLowering) -> PluginEngine | Unsupported:
            lowered = lower_roles(models, graphs.engine_sizes, lowering)
            missing = compiler.missing(lowered.kernels)
            progress.start("compiling kernels", len(missing), "source")
            return compile_roles(
                models, lowered, compiler, options.gpu, lambda: progress.advance(1)
            )

        lowering, engine = without_spills(target_of(options.gpu), options.tactics, compile_with)
        return Lowered(
            engine_sizes=engine.engine_sizes,
            models={},
            files=engine.files,
            weights=engine.weights,
            passes=passes,
            refused=(*engine.refused, *lowering.left_out),
            build_tensorrt=lambda folder: build_plugin_engines(
                folder, engine, options.requested, progress
            ),
            stores_separate_weights=True,
        )


TENSORRT = PluginBackend()


def refuse_foreign_options(requested: BuildOptions) -> None:
    """Raise SpecbuildError for an option that plugins do not support."""
    for is_set, option, reason in (
        (requested.tensorrt.weight_streaming, "--weight-streaming", "its engines have no weights"),
        (requested.specpv.enabled, "--specpv", "its profiles have no rows for partial views"),
    ):
        if is_set:
            raise SpecbuildError(
                f"--backend {requested.backend} does not support {option}: {reason}; "
                "remove the option"
            )


def refuse_lists(engine_sizes: EngineSizes, backend: str) -> None:
    """Raise SpecbuildError for DSA, because no plugin reads lists of selected slots."""
    if engine_sizes.dsa is not None:
        raise SpecbuildError(
            f"--backend {backend} does not support --dsa; build with --backend cuda or cpu, or "
            "with --no-dsa"
        )
