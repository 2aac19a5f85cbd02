"""The ``cuda`` backend: models become programs of kernel launches, other roles become their ops."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from specbuild.builder.backends.backend import (
    Lowered,
    PortableGraphs,
    model_roles,
    run_role_passes,
)
from specbuild.builder.backends.cuda.check import (
    batch_warnings,
    require_cuda_support,
    require_one_view,
    require_quantized_caches,
    require_readable_keys,
)
from specbuild.builder.backends.cuda.compile.nvrtc import Compiler, target_of
from specbuild.builder.backends.cuda.draft_models import draft_parts
from specbuild.builder.backends.cuda.engine import (
    CudaEngine,
    CudaModel,
    LoweredEngine,
    compile_engine,
    lower_engine,
)
from specbuild.builder.backends.cuda.fusions.checkpoint_weights import QuantizedWeights
from specbuild.builder.backends.cuda.lowering import cuda_passes
from specbuild.builder.backends.cuda.options import KernelBackendOptions, kernel_backend_options
from specbuild.builder.backends.cuda.shard.require import (
    require_ranks,
    require_shared_modes,
    require_shares,
)
from specbuild.builder.backends.cuda.sizes import SIZES
from specbuild.builder.backends.cuda.tactics.call_lowering import CallLowering, without_spills
from specbuild.builder.backends.cuda.tactics.measured_code import compiler_mismatches
from specbuild.builder.backends.cuda.tactics.tactic_book import require_tuned, tactics_report
from specbuild.builder.engine.sizes import EngineSizes
from specbuild.builder.graph.passes.pipeline import PassResult
from specbuild.builder.graph.weight_sources import WeightSources
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import Progress
from specbuild.plugins_cuda.launches import Unsupported
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry
from specbuild.runtime.engine_dir.geometry import TargetGeometry


def fused_model(
    graphs: PortableGraphs, options: KernelBackendOptions, progress: Progress
) -> tuple[CudaModel, tuple[PassResult, ...]]:
    """Return the fused graphs from which programs are lowered, and the changes of each pass."""
    sources, draft = graphs.sources, graphs.sources.draft_geometry
    models = {role: graphs.models[role] for role in model_roles(sources)}
    dtype = (draft.dtype if draft is not None else None) or SIZES.draft_dtype
    target_geometry = sources.target_geometry
    keeps_quantized = options.requested.kernels.weights_dtype in (None, "checkpoint")
    weights = None
    if keeps_quantized and sources.quantized:
        ranks = graphs.engine_sizes.ranks
        why_experts = "GPUs share the experts" if ranks > 1 else ""
        weights = QuantizedWeights(
            *_why_tables_are_bf16(sources, options, ranks), bf16_experts=why_experts
        )
    passes_of = partial(
        cuda_passes,
        quantized=weights,
        draft_dtype=dtype,
        weights_dtype=target_geometry.dtype or "bf16",
        tied=target_geometry.tied_head,
        ranks=graphs.engine_sizes.ranks,
    )
    passes = run_role_passes(models, passes_of, options.requested.dump_passes, progress)
    prefilter_head = options.requested.kernels.prefilter_head
    quantized = None if weights is None else weights.record(sources.quantized.values())
    model = CudaModel(models, target_geometry, draft_parts(sources), prefilter_head, quantized)
    return model, passes


def _why_tables_are_bf16(
    sources: WeightSources, options: KernelBackendOptions, ranks: int
) -> tuple[str, str]:
    """Return why the head and the embedding are dequantized; empty if kernels dequantize them."""
    tied = sources.target_geometry.tied_head
    if sources.drafts:
        return ("drafts can read it",) * 2
    table = "GPUs share the head, but not the embedding" if tied and ranks > 1 else ""
    head = "--prefilter-head copies it" if options.requested.kernels.prefilter_head else table
    return head, head if tied else ""


class CudaBackend:
    """See :class:`Backend`."""

    facts = facts_of("cuda")
    sizes = SIZES
    activations = torch.bfloat16

    def options(self, requested: BuildOptions) -> KernelBackendOptions:
        """See :class:`Backend`."""
        return kernel_backend_options(requested)

    def check(
        self,
        requested: BuildOptions,
        target: TargetGeometry,
        draft: DraftGeometry | None,
    ) -> None:
        """See :class:`Backend`."""
        require_cuda_support(target, draft)
        require_ranks(requested.ranks)
        if requested.ranks > 1:
            require_shares(target, requested.ranks)

    def check_engine_sizes(self, engine_sizes: EngineSizes) -> tuple[str, ...]:
        """See :class:`Backend`."""
        require_shared_modes(engine_sizes)
        require_quantized_caches(engine_sizes)
        require_readable_keys(engine_sizes)
        require_one_view(engine_sizes)
        return batch_warnings(engine_sizes)

    def lower(
        self, graphs: PortableGraphs, options: KernelBackendOptions, progress: Progress
    ) -> Lowered:
        """See :class:`Backend`."""
        model, passes = fused_model(graphs, options, progress)
        target, compiler = target_of(options.gpu), Compiler(options.gpu)

        def compile_with(lowering: CallLowering) -> tuple[LoweredEngine, CudaEngine] | Unsupported:
            lowered = lower_engine(model, graphs.engine_sizes, target, lowering)
            if options.tuned_only:
                require_tuned(lowering.tactics, lowering.choices(p for _, p in lowered.programs))
            engine = compile_engine(lowered, compiler, progress)
            return engine if isinstance(engine, Unsupported) else (lowered, engine)

        lowering, (lowered, engine) = without_spills(target, options.tactics, compile_with)
        choices = lowering.choices(program for _, program in lowered.programs)
        tactics = tactics_report(lowering.tactics, choices)
        foreign_tactics = compiler_mismatches(
            [c.entry for c in choices if c.entry], compiler.version
        )
        left_out = (*lowering.left_out, *foreign_tactics)
        report = replace(engine.report, tactics=tactics, left_out=left_out)
        return Lowered(
            lowered.engine_sizes,
            {},
            dict(engine.files),
            lowered.weights,
            passes,
            refused=lowered.refused,
            cuda=report,
            quantized=model.quantized,
        )


CUDA = CudaBackend()
