"""The ``tensorrt-rtx`` backend: every role becomes an engine of standard ops."""

from __future__ import annotations

import torch

from specbuild.builder.backends.backend import (
    BackendOptions,
    Lowered,
    PortableGraphs,
    collected_weights,
    run_role_passes,
)
from specbuild.builder.backends.tensorrt.options import built_for, require_tensorrt_options
from specbuild.builder.backends.tensorrt.standard.check import require_standard_support
from specbuild.builder.backends.tensorrt.standard.engine_files import engine_builder
from specbuild.builder.backends.tensorrt.standard.lowering import expert_storage, standard_passes
from specbuild.builder.backends.tensorrt.standard.profiles import role_profiles
from specbuild.builder.engine.backend_sizes import SHORT_CHAIN, BackendSizes
from specbuild.builder.engine.sizes import EngineSizes
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import Progress
from specbuild.plugins_cuda.kv_write.op import POOL_BODY_AXES
from specbuild.runtime.cache.layout import KV_DTYPE
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry
from specbuild.runtime.engine_dir.geometry import TargetGeometry

SIZES = BackendSizes(
    page_size=64,
    draft_limits=SHORT_CHAIN,
    # Attention's mask has an entry for every head, row and key, so chunks are short.
    prefill_rows=256,
    cache_dtype=KV_DTYPE,
    pool_axes=POOL_BODY_AXES,
    draft_dtype="bf16",
)


class StandardBackend:
    """See :class:`Backend`."""

    facts = facts_of("tensorrt-rtx")
    sizes = SIZES
    activations = torch.bfloat16

    def options(self, requested: BuildOptions) -> BackendOptions:
        """See :class:`Backend`."""
        require_tensorrt_options(requested)
        return BackendOptions(requested, built_for(requested))

    def check(
        self,
        requested: BuildOptions,
        target: TargetGeometry,
        draft: DraftGeometry | None,
    ) -> None:
        """See :class:`Backend`."""
        require_standard_support(target, draft, requested)

    def check_engine_sizes(self, engine_sizes: EngineSizes) -> tuple[str, ...]:  # noqa: ARG002
        """See :class:`Backend`: all sizes are supported."""
        return ()

    def lower(self, graphs: PortableGraphs, options: BackendOptions, progress: Progress) -> Lowered:
        """See :class:`Backend`."""
        models, engine_sizes, requested = graphs.models, graphs.engine_sizes, options.requested
        capabilities = tuple(options.device.split(","))
        steps = standard_passes(expert_storage(capabilities))
        passes = run_role_passes(models, lambda _: steps, requested.dump_passes, progress)
        make = engine_builder(
            models, role_profiles(engine_sizes), capabilities, requested, progress
        )
        weights, separate_weights = collected_weights(models), requested.tensorrt.strip_weights
        return Lowered(
            engine_sizes,
            models,
            {},
            weights,
            passes,
            build_tensorrt=make,
            stores_separate_weights=separate_weights,
        )


TENSORRT_RTX = StandardBackend()
