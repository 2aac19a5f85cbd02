"""An engine directory, loaded: checks requests and generates."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbuild.runtime.cache.page_pool import PagesInstalled, PagesReleased
from specbuild.runtime.cache.page_trace import PageTrace
from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.decode.decoder import Decoder, DraftSetting, Speculation
from specbuild.runtime.decode.device.decoder import DeviceDecoder
from specbuild.runtime.decode.host.cost_file import cache_path
from specbuild.runtime.decode.host.decoder import HostDecoder
from specbuild.runtime.decode.prefix_setup import prefix_cache_of
from specbuild.runtime.decode.session import Session
from specbuild.runtime.draft.device_costs import StepCosts, stored_step_costs, usable_step_costs
from specbuild.runtime.draft.drafter import Drafter
from specbuild.runtime.draft.policy import DraftPolicy
from specbuild.runtime.draft.registry import AUTO
from specbuild.runtime.engine_base import EngineBase
from specbuild.runtime.engine_dir.files import (
    check_sizes,
    manifest_bytes,
    read_file,
    read_manifest,
)
from specbuild.runtime.engine_dir.generation_defaults import GenerationDefaults
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.origin import Origin
from specbuild.runtime.engine_dir.ranks import unmeasured
from specbuild.runtime.errors import RequestError, UnsupportedHereError
from specbuild.runtime.executors.executor import DeviceExecutor, Executor
from specbuild.runtime.executors.registry import gpu_numbers, open_engine
from specbuild.runtime.guides.compiler import GrammarCompiler, Vocabulary
from specbuild.runtime.guides.grammar import Grammar
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.guides.remote import RemoteGrammar
from specbuild.runtime.guides.token_rules import RuledGrammar
from specbuild.runtime.request import (
    Event,
    GenerateParams,
    Prompt,
    Prompts,
    Request,
    params_list,
    prompt_list,
)
from specbuild.runtime.request_checks import bad_sequences, check_params
from specbuild.runtime.settings import DEFAULT_SETTINGS, RuntimeSettings
from specbuild.runtime.text.codec import (
    CHAT_TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TextCodec,
    check_unicode,
)
from specbuild.runtime.text.stream import StopRule, TextStream
from specbuild.runtime.text.tokenizer import TOKENIZER_FILE


class Engine(EngineBase):
    """Decodes with one engine. ``load`` opens a directory; the constructor takes the parts.

    ``step_costs`` choose the default draft of an engine whose steps stay on the device;
    ``without_costs`` is the reason why there are none.
    Raises UnsupportedHereError if the engine does not support the ``settings``.
    ``pages_installed`` and ``pages_released`` are called with every cache page that changes hands.
    """

    def __init__(
        self,
        manifest: Manifest,
        executor: Executor | DeviceExecutor,
        settings: RuntimeSettings = DEFAULT_SETTINGS,
        *,
        text: TextCodec | None = None,
        cost_file: Path | None = None,
        step_costs: StepCosts | None = None,
        without_costs: str = "no step costs were measured",
        pages_released: PagesReleased | None = None,
        pages_installed: PagesInstalled | None = None,
    ) -> None:
        self.manifest = manifest
        self.settings = settings
        stated = None if settings.generation_config == "none" else manifest.generation
        self.generation_defaults = stated or GenerationDefaults()
        self.executor = executor
        self.text = text
        self._kv = KvPools(
            manifest.sequence_groups,
            manifest.limits,
            pages_released,
            pages_installed,
            ahead=executor.capabilities.device_step,
            fixed=executor.capabilities.fixed_pages,
        )
        self.prefixes = prefix_cache_of(manifest, settings, executor, self._kv)
        self.decoder: Decoder
        if isinstance(executor, DeviceExecutor):
            self.decoder = DeviceDecoder(
                executor,
                manifest,
                self._kv,
                settings,
                prefixes=self.prefixes,
                step_costs=step_costs,
                without_costs=without_costs,
            )
        else:
            self.decoder = HostDecoder(
                executor, manifest, self._kv, settings, prefixes=self.prefixes, cost_file=cost_file
            )
        self.session = Session(self.decoder, self._text_stream)
        self._grammars: GrammarCompiler | None = None
        self._grammars_lock = threading.Lock()
        self._isolates_guides = False

    @classmethod
    def load(
        cls, path: str | Path, settings: RuntimeSettings | None = None, **changes: Any
    ) -> Engine:
        """Load an engine directory. Every file is checked, the weights while they stream in.

        ``settings`` None is ``RuntimeSettings()``. Passing its fields as keywords is deprecated.
        Raises EngineFileError if the directory holds no engine, a damaged one or one of another
        origin, and UnsupportedHereError if this machine or engine does not support the settings.
        """
        settings = DEFAULT_SETTINGS if settings is None else settings
        if changes:
            warnings.warn(
                f"Engine.load({', '.join(changes)}=…) is deprecated: pass RuntimeSettings",
                DeprecationWarning,
                stacklevel=2,
            )
            settings = replace(settings, **changes)
        directory, key = Path(path), settings.verify_key
        origin = Origin(None if key is None else Path(key), settings.pin)
        manifest = read_manifest(directory, origin)
        warned = unmeasured(manifest)
        if warned is not None and not settings.experimental:
            raise UnsupportedHereError(f"{directory}: {warned}")
        gpus = gpu_numbers(directory, manifest, settings.device)
        check_sizes(directory, manifest)
        text = _text_codec(directory, manifest, settings.chat_template)
        stored = stored_step_costs(directory, manifest)
        opened = open_engine(directory, manifest, threads=settings.threads, gpus=gpus)
        if isinstance(opened.executor, DeviceExecutor):
            costs, reason = usable_step_costs(stored, manifest, opened.processor)
            measured: dict[str, Any] = {"step_costs": costs, "without_costs": reason}
        else:
            key_parts = (manifest_bytes(directory), opened.processor, *opened.settings)
            measured = {"cost_file": cache_path(settings.cache_dir, *key_parts)}
        engine = cls(manifest, opened.executor, settings, text=text, **measured)
        engine.path = directory
        return engine

    def generate(
        self,
        prompts: Prompts,
        params: GenerateParams | Sequence[GenerateParams] | None = None,
        *,
        speculation: Speculation = "default",
        drafter: Drafter | str = AUTO,
    ) -> Iterator[Event]:
        """Token and finish events of all prompts; what can be refused is refused at once.

        ``prompts`` is a string, a Prompt, or any iterable of either; ``params`` one for all, or one
        for each, None :attr:`default_params`. ``speculation``: a shape, None for no draft, or
        "default" for what pays: the draft that is best by the cost table and the acceptance so far;
        on a GPU without a table the engine's default shape. ``drafter`` is one of the engine's by
        its kind, ``auto``, ``none``, or an object of yours. The output is the same with any of
        them. Where one request is ``exact``, all of them decode without a draft.
        """
        requests = self.check_prompts(prompts, params)
        return self.decode(requests, speculation=speculation, drafter=drafter)

    def check_prompts(
        self,
        prompts: Prompts,
        params: GenerateParams | Sequence[GenerateParams] | None = None,
    ) -> list[Request]:
        """The prompts as requests. RequestError names the first that cannot be served."""
        if self._is_closed:
            raise RequestError("the engine is closed: load it again")
        listed = prompt_list(prompts)
        each = params_list(self.default_params if params is None else params, len(listed))
        return [self._request(prompt, p) for prompt, p in zip(listed, each, strict=True)]

    def decode(
        self,
        requests: Sequence[Request],
        *,
        speculation: Speculation = "default",
        drafter: Drafter | str = AUTO,
    ) -> Iterator[Event]:
        """As ``generate``, of requests that ``check_prompts`` gave."""
        setting = self.session.checked(requests, DraftSetting(speculation, drafter))
        return self._events(requests, setting)

    def _events(self, requests: Sequence[Request], setting: DraftSetting) -> Iterator[Event]:
        """Runs from the first event that is asked for; closing it aborts what is left."""
        stream = self.session.start(requests, setting)
        try:
            yield from stream
        finally:
            stream.close()

    def trace_pages(self, trace: PageTrace | None) -> None:
        """Tells a trace of every page from now on; None ends that. While no request runs."""
        self._kv.trace = trace

    @property
    def used_pages(self) -> float:
        """The share of cache pages in use, in the group that is fullest: 0 to 1."""
        return self._kv.used_share

    @property
    def default_draft(self) -> DraftPolicy:
        """What ``speculation="default"`` last used; its ``reason`` says what it chose, and why."""
        return self.decoder.default_draft

    def _request(self, prompt: Prompt, params: GenerateParams) -> Request:
        where, limit = f"prompt {prompt.id!r}", self.manifest.limits.max_seq_len
        ids = prompt.prompt_ids or self._encoded(prompt, params, where)
        if not ids:
            raise RequestError(f"{where} is empty; give at least one token")
        vocab = self.manifest.target.vocab
        if min(ids) < 0 or max(ids) >= vocab:
            outside = next(i for i in ids if not 0 <= i < vocab)
            raise RequestError(f"{where}: token id {outside} is outside the vocabulary of {vocab}")
        if len(ids) >= limit:
            raise RequestError(
                f"{where} has {len(ids)} tokens, but prompt and output together may have {limit} "
                "(max_seq_len); shorten it or build the engine with a larger --max-seq-len"
            )
        if params.stop and self.text is None:
            raise RequestError(f"{where}: stop strings need a tokenizer, the engine has none")
        check_params(self.manifest, params, where)
        for stop in params.stop:
            check_unicode(stop, f"stop string {stop!r}")
        budget = min(params.max_new_tokens, limit - len(ids))
        return Request(
            prompt.id,
            ids,
            self._plain(params) if params.exact else params,
            budget,
            grammar=self._grammar(params),
        )

    def _grammar(self, params: GenerateParams) -> Grammar | RemoteGrammar | RuledGrammar | None:
        """The guide of a request with its rules for single tokens; None if it has neither."""
        grammar = None if params.guide is None else self.compile(params.guide)
        if not params.bad_words and params.reasoning_budget is None:
            return grammar
        sequences = bad_sequences(self.text, params.bad_words, self.manifest.limits.max_seq_len)
        vocab = self.manifest.target.vocab
        return RuledGrammar(grammar, vocab, sequences, params.reasoning_budget)

    def isolate_guides(self) -> None:
        """Compile guides in processes of their own from now on, so that none can end this one.

        For servers, whose guides come from anybody. :meth:`close_guides` ends the processes.
        """
        self._isolates_guides = True

    def close_guides(self) -> None:
        """End the processes that compile and follow guides; the next guide starts them again."""
        with self._grammars_lock:
            if self._grammars is not None:
                self._grammars.close()
                self._grammars = None

    def compile(self, guide: Guide) -> Grammar | RemoteGrammar:
        """A guide for this engine's tokens; the last ones are kept, so that asking again is cheap.

        RequestError where it is none that can be followed, or the engine has no tokenizer.
        """
        with self._grammars_lock:
            if self._grammars is None:
                if self.text is None:
                    raise guide.error("needs a tokenizer, the engine has none")
                text, target = self.text.tokenizer_json, self.manifest.target
                vocabulary = Vocabulary(text, target.vocab, target.eos_token_ids)
                self._grammars = GrammarCompiler(vocabulary, isolated=self._isolates_guides)
            grammars = self._grammars
        return grammars.compile(guide)

    def _plain(self, params: GenerateParams) -> GenerateParams:
        """The parameters with this engine's lossy modes off."""
        return replace(
            params,
            specpv_retrieval_blocks=None if self.manifest.specpv is None else 0,
            dsa_top_k=None if self.manifest.dsa is None else 0,
        )

    def _encoded(self, prompt: Prompt, params: GenerateParams, where: str) -> tuple[int, ...]:
        if self.text is None:
            raise RequestError(f"{where} is text, but the engine has no tokenizer; give token ids")
        text, most = prompt.prompt or "", self.manifest.limits.max_seq_len
        check_unicode(text, where)
        try:
            if prompt.messages is None:
                return self.text.encode(text, raw=params.raw, most_tokens=most)
            if params.raw:
                raise RequestError("messages go through the chat template; leave raw out")
            return self.text.encode_chat(prompt.messages, most_tokens=most)
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from error

    def _text_stream(self, request: Request) -> TextStream | None:
        if self.text is None or not request.params.detokenize:
            return None
        params = request.params
        stop = StopRule(params.stop, include=params.include_stop_str_in_output)
        return self.text.stream(stop, skip_special_tokens=params.skip_special_tokens)


def _text_codec(directory: Path, manifest: Manifest, chat_template: str | None) -> TextCodec | None:
    """The engine's tokenizer with its chat template or this one; None if it has no tokenizer.

    Raises RequestError if a chat template is given to an engine without a tokenizer.
    """
    if TOKENIZER_FILE not in manifest.files:
        if chat_template is not None:
            raise RequestError("chat_template: the engine has no tokenizer; leave it out")
        return None
    names = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, CHAT_TEMPLATE_FILE)
    tokenizer, config, template = (
        bytes(read_file(directory, manifest, name)) if name in manifest.files else None
        for name in names
    )
    assert tokenizer is not None
    codec = TextCodec(tokenizer, config, template)
    return codec if chat_template is None else codec.with_template(chat_template)
