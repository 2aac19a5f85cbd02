"""The ``cpu`` backend: every role becomes a graph of standard ops for ONNX Runtime."""

from __future__ import annotations

from functools import partial

from specbuild.builder.backends.backend import (
    BackendOptions,
    Lowered,
    PortableGraphs,
    collected_weights,
    run_role_passes,
)
from specbuild.builder.backends.cpu.lowering import cpu_passes
from specbuild.builder.backends.cpu.quantized_products import (
    QuantizedWeights,
    quantize_products,
)
from specbuild.builder.backends.cpu.row_probe import row_probe
from specbuild.builder.backends.foreign_options import (
    refuse_kernel_options,
    refuse_tensorrt_options,
)
from specbuild.builder.engine.backend_sizes import (
    DEFAULT_TREE_LIMITS,
    GUIDE_CHAIN,
    BackendSizes,
)
from specbuild.builder.engine.manifest import graph_file
from specbuild.builder.engine.sizes import EngineSizes
from specbuild.builder.engine.writer import weight_places
from specbuild.builder.graph.passes.portable import portable_bytes
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import Progress
from specbuild.plugins_cuda.kv_write.op import POOL_BODY_AXES
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.cpu.row_padding import PROBE_FILE

SIZES = BackendSizes(
    page_size=16,
    draft_limits=DEFAULT_TREE_LIMITS,
    prefill_rows=256,
    cache_dtype="float32",
    pool_axes=POOL_BODY_AXES,
    draft_dtype="fp32",
    guide_chain=GUIDE_CHAIN,
)


class CpuBackend:
    """See :class:`Backend`; it builds every model, in the dtypes of its checkpoint."""

    facts = facts_of("cpu")
    sizes = SIZES
    activations = None

    def options(self, requested: BuildOptions) -> BackendOptions:
        """See :class:`Backend`."""
        refuse_tensorrt_options(requested)
        refuse_kernel_options(requested)
        return BackendOptions(requested, self.facts.name)

    def check(
        self,
        requested: BuildOptions,  # noqa: ARG002
        target: TargetGeometry,
        draft: DraftGeometry | None,  # noqa: ARG002
    ) -> None:
        """See :class:`Backend`: only some rounded weights are refused."""
        if target.dtype is None:
            return
        unsupported, moe = None, target.moe
        if target.dtype == "fp8" and moe is not None and moe.storage != "mxfp4":
            unsupported = f"experts in {moe.storage} with other weights in fp8"
        if target.mla is not None:
            unsupported = f"a {target.model_type}"
        if unsupported is not None:
            raise SpecbuildError(
                f"--weights-dtype {target.dtype}: a CPU engine simulates the CUDA engine of the "
                f"same model, but CUDA does not support {unsupported}; remove the option"
            )

    def check_engine_sizes(self, engine_sizes: EngineSizes) -> tuple[str, ...]:
        """See :class:`Backend`: SpecPV cannot score blocks of quantized keys."""
        if engine_sizes.specpv is not None and engine_sizes.choosing_group.coded:
            raise SpecbuildError(
                "--kv-dtype fp8: SpecPV scores blocks by keys that are not quantized; remove "
                "--specpv or --kv-dtype, or use --specpv-score indexer"
            )
        return ()

    def lower(self, graphs: PortableGraphs, options: BackendOptions, progress: Progress) -> Lowered:
        """See :class:`Backend`."""
        models, dump = graphs.models, options.requested.dump_passes
        quantized_groups = [group.name for group in graphs.engine_sizes.groups if group.coded]
        statistics, rewrite = QuantizedWeights(), None
        exact = options.requested.cpu.math == "exact"
        if options.requested.kernels.weights_dtype in (None, "checkpoint"):
            rewrite = partial(quantize_products, exact=exact, statistics=statistics)
        rounds_to = graphs.sources.target_geometry.dtype
        passes_of = partial(
            cpu_passes, rounds_to=rounds_to, quantized_groups=quantized_groups, quantized=rewrite
        )
        passes = run_role_passes(models, passes_of, dump, progress)
        weights = collected_weights(models)
        places = weight_places(weights)
        files = {graph_file(role): portable_bytes(model, places) for role, model in models.items()}
        if rewrite is not None:
            statistics.add_others(graphs.sources.quantized.values())
        quantized = statistics.record(exact=exact)
        if quantized is not None and quantized.kernels and not exact:
            files[PROBE_FILE] = row_probe(quantized.kernels)
        return Lowered(graphs.engine_sizes, models, files, weights, passes, quantized=quantized)


CPU = CpuBackend()
