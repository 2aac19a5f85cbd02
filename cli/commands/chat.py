"""``specbuild chat``: a conversation with a model in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from specbuild.builder.options import TreeOptions
from specbuild.cli.model.options import ModelBuildOptions, ModelName
from specbuild.cli.options.config_file import Config, speculation_in
from specbuild.cli.options.derived import takes_options
from specbuild.cli.options.draft_choice import draft_setting_of
from specbuild.cli.options.generation import SamplingOptions
from specbuild.cli.options.shared import (
    Debug,
    DrafterName,
    Experimental,
    GenerationConfigName,
    NoSpec,
    Pin,
    RunsOn,
    Threads,
    VerifyKey,
)
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    pass

_MAX_NEW_TOKENS = 1024
_PANEL = "Output"


@takes_options
def chat(
    model: ModelName,
    *,
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="System message.", rich_help_panel=_PANEL),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens",
            metavar="N",
            min=1,
            help="Maximum number of tokens of an answer.",
            rich_help_panel=_PANEL,
        ),
    ] = _MAX_NEW_TOKENS,
    raw_terminal: Annotated[
        bool,
        typer.Option(
            "--raw-terminal",
            help="Do not escape control characters on a terminal.",
            rich_help_panel=_PANEL,
        ),
    ] = False,
    sampling: SamplingOptions,
    generation_config: GenerationConfigName = "auto",
    build: ModelBuildOptions,
    drafter: DrafterName = None,
    no_spec: NoSpec = False,
    tree: TreeOptions,
    verify_key: VerifyKey = None,
    pin: Pin = None,
    threads: Threads = None,
    device: RunsOn = None,
    experimental: Experimental = False,
    config: Config = None,
    _debug: Debug = False,
) -> None:
    """Chat with a model in the terminal.

    If MODEL is a checkpoint, a GGUF file or a Hugging Face model, an engine is built
    once. On a terminal, accepted draft tokens have another colour. [b]/help[/b] shows
    the commands, ctrl-C stops an answer, ctrl-D ends the chat.

    If standard input is a pipe, each line is a message. Answers go to standard output,
    and statistics to standard error.

    \b
    Examples:
    specbuild chat engine
    specbuild chat engine --system "Answer in one sentence." --temperature 0.7
    specbuild chat HuggingFaceTB/SmolLM2-135M-Instruct
    """
    from specbuild.cli.chat.conversation import Conversation
    from specbuild.cli.chat.terminal import ChatTerminal, piped_lines, typed_lines
    from specbuild.cli.model.engine import engine_for, model_reference
    from specbuild.cli.terminal.console import messages
    from specbuild.cli.terminal.engine_loading import load_engine
    from specbuild.runtime.request import GenerateParams
    from specbuild.runtime.sampling import SamplingParams
    from specbuild.runtime.settings import RuntimeSettings

    stated = {name: value for name, value in vars(sampling).items() if value is not None}
    SamplingParams(**stated)  # a wrong value is refused before the engine is built and loaded
    named_engine = engine_for(model_reference(model), build, config, drafter=drafter)
    settings = RuntimeSettings(
        threads=threads, verify_key=verify_key, pin=pin, device=device,
        experimental=experimental,
        generation_config=generation_config, prefix_caching="auto",
    )  # fmt: skip
    engine = load_engine(named_engine.path, settings)
    if engine.text is None or not engine.text.has_template:
        missing = "tokenizer" if engine.text is None else "chat template"
        raise SpecbuildError(
            f"{named_engine.name} has no {missing}: use specbuild run, which continues a text"
        )
    speculation_in(config).check(engine.manifest)
    params = GenerateParams(
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(**engine.generation_defaults.sampling | stated),
    )
    setting = draft_setting_of(engine.manifest, tree, no_spec=no_spec, drafter=drafter)
    conversation = Conversation(engine, params, setting, system)
    terminal = ChatTerminal(conversation, messages(), raw_terminal=raw_terminal)
    if sys.stdin is not None and sys.stdin.isatty():
        terminal.greet(named_engine.name)
        terminal.run(typed_lines())
    else:
        terminal.run(piped_lines())
