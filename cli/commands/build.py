"""``specbuild build``: compile a checkpoint and its draft into an engine directory."""

from __future__ import annotations

from specbuild.builder.options import BuildOptions
from specbuild.cli.options.config_file import Config, speculation_in
from specbuild.cli.options.derived import takes_options
from specbuild.cli.options.shared import Debug


@takes_options
def build(options: BuildOptions, *, config: Config = None, _debug: Debug = False) -> None:
    """Compile a checkpoint, and optionally its draft, into an engine directory.

    Supported models are GPT-OSS, Llama, Qwen, MiMo, Mistral, Mixtral, Phi, Gemma,
    SmolLM3, OLMo, Granite, GLM, MiniMax-M2, DeepSeek, Kimi and Youtu, as safetensors
    or as a GGUF file (--model model-Q4_K_M.gguf). Draft options are limits: [b]run[/b]
    can use any smaller tree.

    \b
    Examples:
    specbuild build --model target --draft draft --output engine
    specbuild build --model target --output engine --backend cuda --gpu sm_90a
    specbuild build --config engine.yaml --output engine
    """
    from specbuild.cli.model.engine import build_checked
    from specbuild.cli.tables.engine_table import add_tactics, build_summary
    from specbuild.cli.terminal.console import messages
    from specbuild.cli.terminal.progress_bar import ProgressBar
    from specbuild.runtime.engine_dir.files import read_manifest

    with ProgressBar() as progress:
        report = build_checked(options, speculation_in(config), progress)
    table = build_summary(options.output, read_manifest(options.output))
    add_tactics(table, report.cuda)
    messages().print(table)
