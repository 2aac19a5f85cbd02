"""``specbuild serve``: serve an engine over HTTP with OpenAI's API."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from specbuild.builder.options import TreeOptions
from specbuild.cli.model.options import ModelBuildOptions, ModelName
from specbuild.cli.options.config_file import Config, speculation_in
from specbuild.cli.options.derived import takes_options
from specbuild.cli.options.draft_choice import draft_setting_of
from specbuild.cli.options.page_bytes import PageOptions
from specbuild.cli.options.server import (
    AddressOptions,
    EventOptions,
    ModelOptions,
    PrefixOptions,
    QueueOptions,
    read_option_file,
)
from specbuild.cli.options.shared import (
    Debug,
    DrafterName,
    DraftTree,
    Exact,
    Experimental,
    GenerationConfigName,
    KvPages,
    NoSpec,
    Pin,
    RowsPerTurn,
    RunsOn,
    Threads,
    Trace,
    VerifyKey,
)
from specbuild.cli.terminal.collector import starting
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.settings import DEFAULT_KV_POLICY

if TYPE_CHECKING:
    from specbuild.runtime.engine import Engine
    from specbuild.runtime.engine_dir.manifest import Manifest
    from specbuild.runtime.engine_dir.origin import Origin
    from specbuild.runtime.serve.parsers.output_formats import OutputFormat
    from specbuild.runtime.serve.server import Address


@takes_options
def serve(
    model: ModelName,
    *,
    address: AddressOptions,
    naming: ModelOptions,
    queue: QueueOptions,
    prefix: PrefixOptions,
    events: EventOptions,
    build: ModelBuildOptions,
    generation_config: GenerationConfigName = "auto",
    drafter: DrafterName = None,
    draft_tree: DraftTree = None,
    no_spec: NoSpec = False,
    exact: Exact = False,
    tree: TreeOptions,
    verify_key: VerifyKey = None,
    pin: Pin = None,
    prefill_rows_per_turn: RowsPerTurn = None,
    kv_policy: KvPages = DEFAULT_KV_POLICY,
    pages: PageOptions,
    threads: Threads = None,
    device: RunsOn = None,
    experimental: Experimental = False,
    trace: Trace = None,
    config: Config = None,
    _debug: Debug = False,
) -> None:
    """Serve a model over HTTP with OpenAI's API.

    A checkpoint, a GGUF file or a Hugging Face model is built into an engine once.
    Routes: /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, /v1/models,
    /tokenize, /detokenize, /health, /metrics, and a chat page at /. On SIGTERM and
    ctrl-C open requests finish; a second ctrl-C aborts them.

    \b
    Examples:
    specbuild serve HuggingFaceTB/SmolLM2-135M-Instruct
    specbuild serve engine --host 0.0.0.0 --api-key-file keys.txt
    specbuild serve engine --uds /run/specbuild.sock --max-queue 64
    """
    require_extra()
    from specbuild.cli.model.engine import engine_for, model_reference

    named_engine = engine_for(model_reference(model), build, config, drafter=drafter)
    with starting() as started:
        from specbuild.cli.terminal.console import messages
        from specbuild.cli.terminal.engine_loading import load_engine, traced
        from specbuild.runtime.engine_dir.origin import Origin
        from specbuild.runtime.serve.app import App, AppOptions
        from specbuild.runtime.serve.server import serve as run_server
        from specbuild.runtime.serve.service import ServiceOptions
        from specbuild.runtime.settings import PrefillSchedule, RuntimeSettings

        keys = _keys(address)
        place = _place(address)
        _warn_without_keys(place, keys)
        if exact and (tree.given() or draft_tree):
            raise SpecbuildError("--exact decodes without a draft: leave the --draft options out")
        manifest = _checked(named_engine.path, Origin(verify_key, pin), naming, device)
        speculation_in(config).check(manifest)
        setting = draft_setting_of(
            manifest, tree, no_spec=no_spec or exact, drafter=drafter, tree_file=draft_tree
        )
        _show_footprint(manifest, pages)
        settings = RuntimeSettings(
            threads=threads, verify_key=verify_key, pin=pin, device=device,
            experimental=experimental,
            generation_config=generation_config, chat_template=naming.template,
            prefill=PrefillSchedule(prefill_rows_per_turn), kv_policy=kv_policy,
            **prefix.settings,
        )  # fmt: skip
        loaded = load_engine(named_engine.path, settings)
        names = naming.served_model_name or (named_engine.name,)
        app = App(
            loaded,
            AppOptions(
                service=ServiceOptions(
                    names=names, max_queue=queue.max_queue, setting=setting, exact=exact,
                    max_logprobs=naming.max_logprobs,
                    trusts_templates=naming.trust_request_chat_template,
                    **naming.answer_settings,
                ),
                output_format=_form(loaded, naming),
                keys=keys,
                origins=address.cors,
                hosts=address.allowed_hosts or place.default_hosts,
                log_requests=queue.log_requests, log_json=queue.log_format == "json",
                page=not address.no_page,
            ),
        )  # fmt: skip

        notify = partial(messages().print, soft_wrap=True)

        def ready(name: object) -> None:
            notify(_address_line(names[0], place, name, page=not address.no_page))
            logs.enter_context(queue.logged(app.service, notify))
            started()

        with traced(loaded, trace), events.published(loaded), ExitStack() as logs:
            run_server(app, place, ready=ready, notify=notify)


def _place(address: AddressOptions) -> Address:
    """Return the server's address. RequestError if its certificate cannot be read."""
    from specbuild.runtime.serve.server import Address

    return Address(
        host=address.host,
        port=address.port,
        uds=address.uds,
        ssl_certfile=address.ssl_certfile,
        ssl_keyfile=address.ssl_keyfile,
    )


def _address_line(name: str, place: Address, socket_name: object, *, page: bool) -> str:
    """Return the line with the server's address as its last word."""
    if place.uds is not None:
        return f"serving {name} at {place.uds}"
    paths = "API below /v1, chat page at /" if page else "API below /v1"
    return f"{paths}: serving {name} at {place.scheme}://{place.host}:{_port(socket_name)}"


def _warn_without_keys(place: Address, keys: object) -> None:
    from specbuild.cli.terminal.console import messages

    if place.is_public and not keys:
        messages().print(
            f"warning: {place} is public and needs no API key; set --api-key, or use 127.0.0.1"
        )


def _checked(engine: Path, origin: Origin, model: ModelOptions, device: str | None) -> Manifest:
    """Return the manifest; SpecbuildError for contradicting options, before anything is loaded."""
    from specbuild.runtime.engine_dir.files import read_manifest
    from specbuild.runtime.executors.registry import gpu_numbers
    from specbuild.runtime.text.tokenizer import TOKENIZER_FILE

    manifest = read_manifest(engine, origin)
    gpu_numbers(engine, manifest, device)
    if model.chat_template is not None and TOKENIZER_FILE not in manifest.files:
        raise SpecbuildError("--chat-template: the engine has no tokenizer")
    return manifest


def _show_footprint(manifest: Manifest, pages: PageOptions) -> None:
    from specbuild.cli.tables.cache_tables import footprint
    from specbuild.cli.tables.predicted_memory import predict_memory
    from specbuild.cli.terminal.console import messages

    memory = predict_memory(manifest)
    messages().print(footprint(manifest, memory))
    pages.check(manifest.cache_groups, memory)


def require_extra() -> None:
    """Raise SpecbuildError if a library of the extra ``serve`` is missing."""
    needed = ("starlette", "uvicorn", "httptools", "uvloop", "pydantic", "prometheus_client")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise SpecbuildError(
            f"specbuild serve needs {missing[0]}: pip install '.[serve]' in the checkout"
        )


def _form(engine: Engine, model: ModelOptions) -> OutputFormat | None:
    """Return the output format; None for an engine without a tokenizer."""
    from specbuild.runtime.serve.parsers.output_formats import output_format

    if engine.text is None:
        return None
    engine.text.check_template()
    return output_format(
        engine.text,
        engine.manifest.target.eos_token_ids,
        reasoning=model.reasoning_parser,
        tool_calls=model.tool_call_parser,
    )


def _keys(address: AddressOptions) -> tuple[str, ...]:
    """Return the keys of both options."""
    keys = list(address.api_key)
    if address.api_key_file is not None:
        lines = read_option_file(address.api_key_file, "--api-key-file").split()
        if not lines:
            raise SpecbuildError(f"--api-key-file {address.api_key_file} holds no key")
        keys += lines
    return tuple(keys)


def _port(name: object) -> object:
    """Return the port in a socket's own name."""
    return name[1] if isinstance(name, tuple) else name
