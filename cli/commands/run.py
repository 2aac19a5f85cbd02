"""``specbuild run``: decode prompts with an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from specbuild.builder.options import TreeOptions
from specbuild.cli.model.options import ModelBuildOptions, ModelName
from specbuild.cli.options.config_file import Config, speculation_in
from specbuild.cli.options.derived import takes_options
from specbuild.cli.options.draft_choice import draft_setting_of
from specbuild.cli.options.generation import OutputOptions, PromptOptions, SamplingOptions
from specbuild.cli.options.lossy import DsaRequest, SpecPvRequest
from specbuild.cli.options.shared import (
    Debug,
    DrafterName,
    DraftTree,
    Exact,
    Experimental,
    GenerationConfigName,
    Json,
    KvPages,
    NoSpec,
    Pin,
    PromptText,
    RowsPerTurn,
    RunsOn,
    Threads,
    Trace,
    VerifyKey,
)
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.settings import DEFAULT_KV_POLICY

if TYPE_CHECKING:
    from specbuild.cli.terminal.prompt_line import PlacedPrompt
    from specbuild.runtime.engine import Engine
    from specbuild.runtime.records import RunRecord
    from specbuild.runtime.request import FinishEvent, GenerateParams, Request, TokenEvent


@takes_options
def run(
    model: ModelName,
    prompt_text: PromptText = None,
    *,
    text: PromptOptions,
    output_options: OutputOptions,
    sampling: SamplingOptions,
    generation_config: GenerationConfigName = "auto",
    build: ModelBuildOptions,
    drafter: DrafterName = None,
    draft_tree: DraftTree = None,
    no_spec: NoSpec = False,
    exact: Exact = False,
    tree: TreeOptions,
    specpv: SpecPvRequest,
    dsa: DsaRequest,
    verify_key: VerifyKey = None,
    pin: Pin = None,
    prefill_rows_per_turn: RowsPerTurn = None,
    kv_policy: KvPages = DEFAULT_KV_POLICY,
    threads: Threads = None,
    device: RunsOn = None,
    experimental: Experimental = False,
    trace: Trace = None,
    config: Config = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Decode prompts with a model, with speculative decoding if it has a draft.

    A checkpoint, a GGUF file or a Hugging Face model is built into an engine once;
    [b]specbuild cache list[/b] shows these engines. To copy an engine to another machine,
    use [b]specbuild build[/b].

    The prompt is PROMPT or [b]--prompt TEXT[/b], the whole standard input, or one per
    line of [b]--prompts FILE.jsonl[/b]: {"id": "a", "prompt": "text"}, or
    "prompt_ids": \\[1, 2], or "messages" for the chat template. A line can also set
    parameters of its prompt, for example "temperature", "seed" and "stop".

    The text goes to standard output, with accepted draft tokens in another colour, and
    statistics go to standard error. With [b]--json[/b] standard output has one JSON
    object per prompt, in input order.

    \b
    Examples:
    specbuild run engine "def area(radius):"
    specbuild run HuggingFaceTB/SmolLM2-135M-Instruct "What is a prime number?"
    specbuild run engine --prompts prompts.jsonl --json --seed 7
    """
    from specbuild.cli.model.engine import engine_for, model_reference
    from specbuild.cli.terminal.engine_loading import load_engine, traced
    from specbuild.cli.terminal.prompt_line import guide_of
    from specbuild.runtime.engine_dir.generation_defaults import GenerationDefaults
    from specbuild.runtime.request import DEFAULT_PARAMS, GenerateParams
    from specbuild.runtime.sampling import SamplingParams
    from specbuild.runtime.settings import PrefillSchedule, RuntimeSettings

    reference = model_reference(model)
    _check_exact(exact, tree.given(), draft_tree, specpv.retrieval_blocks, dsa.top_k)
    _check_shown(output_options, as_json=as_json)
    placed = _prompts(prompt_text, text)
    _check_seeds(sampling.first_seed, len(placed))
    stated = {name: value for name, value in vars(sampling).items() if value is not None}

    def params_of(defaults: GenerationDefaults) -> list[GenerateParams]:
        """Return the parameters of each prompt, with these defaults if it sets none."""
        max_tokens = output_options.max_new_tokens or defaults.max_new_tokens
        values = defaults.sampling | stated
        return [
            item.params(
                GenerateParams(
                    max_new_tokens=max_tokens or DEFAULT_PARAMS.max_new_tokens,
                    sampling=SamplingParams(**values | {"seed": sampling.first_seed + i}),
                    stop=output_options.stop,
                    ignore_eos=output_options.ignore_eos,
                    min_tokens=output_options.min_tokens,
                    top_logprobs=output_options.top_logprobs,
                    logprobs=output_options.logprobs,
                    guide=guide_of(output_options.guide),
                    raw=text.raw,
                    specpv_retrieval_blocks=specpv.retrieval_blocks,
                    dsa_top_k=dsa.top_k,
                    exact=exact,
                )
            )
            for i, item in enumerate(placed)
        ]

    params_of(GenerationDefaults())  # A wrong value is refused before the engine is loaded.
    engine = engine_for(reference, build, config, drafter=drafter)
    settings = RuntimeSettings(
        threads=threads, verify_key=verify_key, pin=pin, device=device,
        experimental=experimental,
        generation_config=generation_config,
        prefill=PrefillSchedule(prefill_rows_per_turn), kv_policy=kv_policy,
    )  # fmt: skip
    loaded = load_engine(engine.path, settings)
    speculation_in(config).check(loaded.manifest)
    setting = draft_setting_of(
        loaded.manifest, tree, no_spec=no_spec or exact, drafter=drafter, tree_file=draft_tree
    )
    requests = _requests(loaded, placed, params_of(loaded.generation_defaults), output_options)
    events = loaded.decode(requests, speculation=setting.speculation, drafter=setting.drafter)
    with traced(loaded, trace):
        if as_json:
            _print_records(events, with_logprobs=output_options.logprobs)
            return
        _stream(loaded, requests, events, raw_terminal=output_options.raw_terminal)
    _print_notes(loaded, default_draft=setting.speculation == "default")


def _prompts(prompt: str | None, options: PromptOptions) -> list[PlacedPrompt]:
    """Return the prompt after MODEL, else those of the options. SpecbuildError if both exist."""
    from specbuild.cli.terminal.prompt_file import read_prompts

    if prompt is not None and options.prompt is not None:
        raise SpecbuildError("the prompt was given twice: after MODEL and with --prompt")
    return read_prompts(options.prompt if prompt is None else prompt, options.prompts)


def _requests(
    engine: Engine,
    placed: Sequence[PlacedPrompt],
    params: Sequence[GenerateParams],
    output: OutputOptions,
) -> list[Request]:
    """Return the prompts as requests; warn if the context ends before their outputs."""
    from specbuild.cli.terminal.console import messages
    from specbuild.cli.terminal.prompt_file import checked_requests

    requests, stated = checked_requests(engine, placed, params), output.max_new_tokens
    cut = [r for r in requests if stated is not None and r.token_budget < stated]
    if cut:
        shortest = min(cut, key=lambda request: request.token_budget)
        messages().print(
            f"warning: --max-new-tokens {stated} exceeds the context: prompt {shortest.id} leaves "
            f"{shortest.token_budget} tokens; --max-seq-len of the build sets the context",
            soft_wrap=True,
        )
    return requests


def _check_exact(exact: bool, *others: object) -> None:
    """Raise SpecbuildError if an option of drafts or lossy modes is combined with --exact."""
    if exact and any(others):
        raise SpecbuildError(
            "--exact decodes without a draft and without lossy modes: leave the --draft, --specpv "
            "and --dsa options out"
        )


def _check_shown(output: OutputOptions, *, as_json: bool) -> None:
    """Raise SpecbuildError if log-probabilities are requested and no output would have them."""
    if (output.logprobs or output.top_logprobs) and not as_json:
        name = "--logprobs" if output.logprobs else "--top-logprobs"
        raise SpecbuildError(f"{name} shows in JSON only: add --json")


def _check_seeds(first: int, count: int) -> None:
    """Raise SpecbuildError unless each of ``count`` prompts has a seed, counted from the first."""
    from specbuild.runtime.sampling import MAX_SEED, MIN_SEED

    if not MIN_SEED <= first <= MAX_SEED - count + 1:
        raise SpecbuildError(
            f"--seed {first}: the last of {count} prompts would sample with {first + count - 1}; "
            f"give {MIN_SEED} to {MAX_SEED - count + 1}"
        )


def _print_notes(engine: Engine, *, default_draft: bool) -> None:
    """Print the engine's lossy modes, and the reason for the draft if the user chose none."""
    from specbuild.cli.terminal.console import messages

    dtype = engine.manifest.target.dtype
    if dtype is not None:
        messages().print(f"weights: {dtype} (lossy)")
    if engine.manifest.lossy_groups:
        messages().print("keys and values: fp8 (lossy)")
    if default_draft:
        messages().print(f"draft: {engine.default_draft.reason}", soft_wrap=True)


def _print_records(events: Iterator[TokenEvent | FinishEvent], *, with_logprobs: bool) -> None:
    import json

    from specbuild.runtime.engine_dir.strict_json import to_json
    from specbuild.runtime.request import FinishEvent

    finished: dict[int, RunRecord] = {}
    following = 0
    for event in events:
        if not isinstance(event, FinishEvent):
            continue
        finished[event.request] = event.record
        while following in finished:
            line = to_json(finished.pop(following))
            if not with_logprobs:
                del line["logprobs"]
            if line["top_logprobs"] is None:
                del line["top_logprobs"]
            for key in ("specpv", "dsa", "masked_tokens"):
                if line["stats"][key] is None:
                    del line["stats"][key]
            print(json.dumps(line, allow_nan=False), flush=True)
            following += 1


def _stream(
    engine: Engine,
    requests: Sequence[Request],
    events: Iterator[TokenEvent | FinishEvent],
    *,
    raw_terminal: bool,
) -> None:
    from specbuild.cli.terminal.token_stream import TokenStream
    from specbuild.runtime.request import TokenEvent

    stream = TokenStream([request.id for request in requests], raw_terminal=raw_terminal)
    records: dict[int, RunRecord] = {}
    for event in events:
        if isinstance(event, TokenEvent):
            text = f"{event.token_id} " if engine.text is None else event.text
            stream.write(event.request, text, from_draft=event.from_draft)
        else:
            records[event.request] = event.record
            stream.finish(event.request, event.record.text)

    from specbuild.cli.tables.run_table import run_table
    from specbuild.cli.terminal.console import messages

    messages().print(run_table([records[i] for i in sorted(records)]))
