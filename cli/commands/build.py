"""``specbuild build``: compile a checkpoint and its draft into an engine directory."""

from __future__ import annotations

from dataclasses import replace

from specbuild.builder.options import BuildOptions
from specbuild.cli.options.config_file import Config, speculation_in
from specbuild.cli.options.derived import takes_options
from specbuild.cli.options.shared import Debug


@takes_options
def build(asked: BuildOptions, *, config: Config = None, _debug: Debug = False) -> None:
    """Compile a checkpoint, and optionally its draft, into an engine directory.

    Supported models are GPT-OSS, Llama, Qwen2, Qwen3, MiMo, DeepSeek, Kimi, GLM and
    Youtu, as safetensors or as a GGUF file (--model model-Q4_K_M.gguf). Draft
    options are limits: [b]run[/b] can use any smaller tree.

    \b
    Examples:
    specbuild build --model target --draft draft --output engine
    specbuild build --model target --output engine --backend cuda --gpu sm_90a
    specbuild build --config engine.yaml --output engine
    """
    from specbuild.builder.build import build as build_engine
    from specbuild.builder.inputs import read_checkpoints
    from specbuild.cli.tables.engine_table import add_tactics, build_summary
    from specbuild.cli.terminal.console import messages
    from specbuild.cli.terminal.progress_bar import ProgressBar
    from specbuild.runtime.engine_dir.files import read_manifest

    speculation = speculation_in(config)
    if not speculation.drafts:
        asked = replace(asked, draft=None)
    with ProgressBar() as progress:
        checkpoints = None
        if speculation.wants_latents is not None:
            checkpoints = read_checkpoints(asked, progress)
            speculation.check_latents(checkpoints[0].geometry)
        report = build_engine(asked, progress, checkpoints=checkpoints)
    table = build_summary(asked.output, read_manifest(asked.output))
    add_tactics(table, report.cuda)
    messages().print(table)
