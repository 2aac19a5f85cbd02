"""``specbuild build``: a checkpoint, and its draft, into an engine directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbuild.cli.options import dsa as dsa_options
from specbuild.cli.options import shared as options
from specbuild.cli.options import specpv as specpv_options
from specbuild.cli.options import tensorrt as tensorrt_options
from specbuild.runtime.engine_dir.backends import BackendName


def build(
    *,
    model: options.Model,
    output: Annotated[
        Path, typer.Option("--output", metavar="DIR", help="Engine directory to write.")
    ],
    draft: options.Draft = None,
    backend: Annotated[
        BackendName,
        typer.Option("--backend", help="What the engine runs on."),
    ] = "cpu",
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="ARCH",
            help="GPU to compile for: sm_90a with --backend cuda; with tensorrt-rtx one or more of "
            "sm_80, sm_86, sm_89, sm_120 and sm_121, separated by commas.",
        ),
    ] = None,
    max_seq_len: Annotated[
        int | None,
        typer.Option("--max-seq-len", metavar="N", min=1, help="Longest prompt plus output."),
    ] = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option("--max-batch-size", metavar="N", min=1, help="Sequences decoded at once."),
    ] = None,
    page_size: Annotated[
        int | None,
        typer.Option("--page-size", metavar="N", min=1, help="Tokens in a page of the KV cache."),
    ] = None,
    draft_top_k: options.DraftTopK = None,
    draft_depth: options.DraftDepth = None,
    draft_tokens: options.DraftTokens = None,
    draft_window: Annotated[
        int | None,
        typer.Option(
            "--draft-window",
            metavar="N",
            min=1,
            help="Let the draft attend to its last N tokens only; the output stays the same.",
        ),
    ] = None,
    tactics: options.Tactics = None,
    tuned_only: options.TunedOnly = False,
    draft_dtype: options.DraftDtype = None,
    timing_cache: tensorrt_options.TimingCache = None,
    version_compatible: tensorrt_options.VersionCompatible = False,
    hardware_compatible: tensorrt_options.HardwareCompatible = False,
    weight_streaming: tensorrt_options.WeightStreaming = False,
    strip_weights: tensorrt_options.StripWeights = False,
    specpv: specpv_options.Enable = False,
    specpv_block_size: specpv_options.BlockSize = None,
    specpv_n_sink_blocks: specpv_options.SinkBlocks = None,
    specpv_n_retrieval_blocks: specpv_options.RetrievalBlocks = None,
    specpv_n_window_blocks: specpv_options.WindowBlocks = None,
    specpv_n_spec_tokens_buf: specpv_options.SpecTokensBuf = None,
    specpv_partial_threshold: specpv_options.PartialThreshold = None,
    specpv_full_refresh_interval: specpv_options.FullRefreshInterval = None,
    specpv_reduction: specpv_options.Reduction = None,
    specpv_score: specpv_options.Score = None,
    no_mla: Annotated[
        bool,
        typer.Option("--no-mla", help="Leave mla_kv.safetensors out: cache keys and values."),
    ] = False,
    dsa: dsa_options.Enable = None,
    dsa_top_k: dsa_options.TopK = None,
    dsa_threshold: dsa_options.Threshold = None,
    dsa_first_tokens: dsa_options.FirstTokens = None,
    dsa_recent_tokens: dsa_options.RecentTokens = None,
    dsa_min_agreement: dsa_options.MinAgreement = None,
    dsa_check_interval: dsa_options.CheckInterval = None,
    dsa_key_dtype: dsa_options.KeyDtype = None,
    keep_onnx: Annotated[
        bool, typer.Option("--keep-onnx", help="Keep the portable ONNX graphs, for Netron.")
    ] = False,
    dump_passes: Annotated[
        Path | None,
        typer.Option("--dump-passes", metavar="DIR", help="Write the graph after each pass."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse config fields that are not known.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output.")] = False,
    _debug: options.Debug = False,
) -> None:
    """Build a checkpoint, and its EAGLE3 draft, into an engine directory.

    Targets are GPT-OSS, or DeepSeek-V3 for the CPU. The draft options are limits: [b]run[/b] may
    ask for any smaller tree.

    \b
    Examples:
    specbuild build --model target --draft draft --output engine
    specbuild build --model target --output engine --max-seq-len 4096 --force
    specbuild build --model target --draft draft --output engine --draft-top-k 4 --draft-depth 4
    specbuild build --model target --output engine --no-mla
    specbuild build --model target --draft draft --output engine --backend cuda --gpu sm_90a
    specbuild build --model target --draft draft --output engine --backend cuda --draft-dtype fp8
    specbuild build --model target --output engine --backend cuda --tactics h200.json --tuned-only
    specbuild build --model target --draft draft --output engine --max-seq-len 32768 --specpv
    specbuild build --model target --output engine --max-seq-len 32768 --dsa --dsa-top-k 1024
    specbuild build --model target --draft draft --output engine --backend tensorrt-rtx --gpu sm_120
    specbuild build --model target --output engine --backend tensorrt-rtx --gpu sm_89,sm_120
    specbuild build --model target --output engine --backend tensorrt --timing-cache timings.bin
    """
    from specbuild.builder.build import build as build_engine
    from specbuild.builder.options import BuildOptions
    from specbuild.cli.tables.engine_table import add_tactics, build_summary
    from specbuild.cli.terminal.console import messages
    from specbuild.cli.terminal.progress_bar import ProgressBar
    from specbuild.runtime.engine_dir.files import read_manifest

    asked = BuildOptions.from_flat(
        model=model,
        output=output,
        draft=draft,
        backend=backend,
        gpu=gpu,
        max_seq_len=max_seq_len,
        max_batch_size=max_batch_size,
        page_size=page_size,
        draft_top_k=draft_top_k,
        draft_depth=draft_depth,
        draft_tokens=draft_tokens,
        draft_window=draft_window,
        draft_dtype=draft_dtype,
        tactics=tactics,
        tuned_only=tuned_only,
        timing_cache=timing_cache,
        version_compatible=version_compatible,
        hardware_compatible=hardware_compatible,
        weight_streaming=weight_streaming,
        strip_weights=strip_weights,
        specpv=specpv,
        specpv_block_size=specpv_block_size,
        specpv_n_sink_blocks=specpv_n_sink_blocks,
        specpv_n_retrieval_blocks=specpv_n_retrieval_blocks,
        specpv_n_window_blocks=specpv_n_window_blocks,
        specpv_n_spec_tokens_buf=specpv_n_spec_tokens_buf,
        specpv_partial_threshold=specpv_partial_threshold,
        specpv_full_refresh_interval=specpv_full_refresh_interval,
        specpv_reduction=specpv_reduction,
        specpv_score=specpv_score,
        no_mla=no_mla,
        dsa=dsa,
        dsa_top_k=dsa_top_k,
        dsa_threshold=dsa_threshold,
        dsa_first_tokens=dsa_first_tokens,
        dsa_recent_tokens=dsa_recent_tokens,
        dsa_min_agreement=dsa_min_agreement,
        dsa_check_interval=dsa_check_interval,
        dsa_key_dtype=dsa_key_dtype,
        keep_onnx=keep_onnx,
        dump_passes=dump_passes,
        strict=strict,
        force=force,
    )
    with ProgressBar() as progress:
        report = build_engine(asked, progress)
    table = build_summary(output, read_manifest(output))
    add_tactics(table, report.cuda)
    messages().print(table)
