"""An engine directory, loaded: checks requests and generates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias

from specbuild.runtime.cost_table import CostMeasurement, CostTable, cache_path, load_or_measure
from specbuild.runtime.device import check_here, this_device
from specbuild.runtime.draft_tree import check_shape
from specbuild.runtime.drafting import Drafter, Eagle3Drafter
from specbuild.runtime.engine_file import check_sizes, open_weights, read_file, read_manifest
from specbuild.runtime.errors import RequestError, UnsupportedHereError
from specbuild.runtime.executor import Executor
from specbuild.runtime.executors.cpu import CpuExecutor
from specbuild.runtime.generate import Generation
from specbuild.runtime.kv_pool import KvPools, PagesReleased, slots_per_sequence
from specbuild.runtime.launch import SlotCounter
from specbuild.runtime.manifest import MANIFEST_FILE, WEIGHTS_FILE, DraftShape, Manifest
from specbuild.runtime.manifest_check import DECODING_ROLES, DRAFTING_ROLES
from specbuild.runtime.policy import DraftPolicy, FixedPolicy, MeasuredPolicy, prior_of
from specbuild.runtime.request import Event, GenerateParams, Prompt, Request
from specbuild.runtime.text import (
    CHAT_TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    TextCodec,
    TextStream,
    check_unicode,
)

# Every graph has threads of its own: without a bound a slip of the pen takes the machine down.
MAX_THREADS = 64

Speculation: TypeAlias = DraftShape | Literal["default"] | None


class Engine:
    """Decodes with one engine. ``load`` opens a directory; the constructor takes the parts."""

    def __init__(
        self,
        manifest: Manifest,
        executor: Executor,
        *,
        text: TextCodec | None = None,
        cost_file: Path | None = None,
        pages_released: PagesReleased | None = None,
    ) -> None:
        self.manifest = manifest
        self.executor = executor
        self.text = text
        self._cost_file = cost_file
        limits = manifest.limits
        self._kv = KvPools(manifest.cache_groups, limits, pages_released)
        self._measured: dict[bool, MeasuredPolicy] = {}
        self._last_measured: MeasuredPolicy | None = None
        self._counter = SlotCounter(slots_per_sequence(limits) + limits.max_rows + 1)

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str = "cpu",
        threads: int | None = None,
        *,
        cache_dir: Path | None = None,
    ) -> Engine:
        """Opens an engine directory; every file is checked, weights while they stream in.

        ``threads`` None is one thread, which is fastest for small models. ``cache_dir`` keeps
        the measured cost table between runs. Raises EngineFileError where the directory is no
        engine or damaged, UnsupportedHereError where this machine lacks what it needs.
        """
        directory = Path(path)
        manifest = read_manifest(directory)
        if device != manifest.backend:
            raise UnsupportedHereError(
                f"{directory} was built for {manifest.backend}, not for {device}; "
                f"use device {manifest.backend!r} or build it for {device}"
            )
        threads = 1 if threads is None else threads
        here = this_device()
        most = max(here.cores, MAX_THREADS)
        if not 1 <= threads <= most:
            raise UnsupportedHereError(
                f"threads is {threads}, must lie between 1 and {most}; this machine has "
                f"{here.cores} cores"
            )
        reasons = check_here(manifest, here)
        if reasons:
            raise UnsupportedHereError(f"{directory} does not run here: {'; '.join(reasons)}")
        check_sizes(directory, manifest)
        files = {
            name: bytes(read_file(directory, manifest, name))
            for name in manifest.files
            if name != WEIGHTS_FILE
        }
        weights = open_weights(directory, manifest) if manifest.tensors else {}
        executor = CpuExecutor(manifest, files.__getitem__, weights, threads=threads)
        text = None
        if TOKENIZER_FILE in files:
            text = TextCodec(
                files[TOKENIZER_FILE],
                files.get(TOKENIZER_CONFIG_FILE),
                files.get(CHAT_TEMPLATE_FILE),
            )
        digest = (directory / MANIFEST_FILE).read_bytes()
        cost_file = cache_path(cache_dir, digest, here.cpu_name, threads, here.onnxruntime)
        return cls(manifest, executor, text=text, cost_file=cost_file)

    def check_prompts(
        self, prompts: Sequence[Prompt], params: GenerateParams | Sequence[GenerateParams]
    ) -> list[Request]:
        """The prompts as requests. RequestError names the first that cannot be served."""
        if isinstance(params, GenerateParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts, but {len(params)} sets of parameters")
        return [self._request(prompt, p) for prompt, p in zip(prompts, params, strict=True)]

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: GenerateParams | Sequence[GenerateParams],
        *,
        speculation: Speculation = "default",
        drafter: Drafter | None = None,
    ) -> Iterator[Event]:
        """Token and finish events of all prompts; what can be refused is refused at once.

        ``speculation``: a shape, None for no draft, or "default" for the chain that pays by the
        cost table and the acceptance so far. The output is the same with any of them.
        """
        requests = self.check_prompts(prompts, params)
        self.executor.prepare(DECODING_ROLES)
        sampled = any(request.params.sampling.temperature > 0 for request in requests)
        policy = self._policy(speculation, drafter, sampled=sampled)
        if policy.max_depth == 0:
            drafter = None
        elif drafter is None:
            drafter = Eagle3Drafter(self.executor, self.manifest, self._counter)
            self.executor.prepare(DRAFTING_ROLES)
        generation = Generation(
            executor=self.executor,
            manifest=self.manifest,
            kv=self._kv,
            counter=self._counter,
            requests=requests,
            drafter=drafter,
            policy=policy,
            text_stream=self._text_stream,
        )
        return generation.events()

    @property
    def default_draft(self) -> DraftPolicy:
        """What ``speculation="default"`` last used; its ``reason`` says what it chose, and why."""
        return self._last_measured or self._measured_policy(sampled=False)

    def _measured_policy(self, *, sampled: bool) -> DraftPolicy:
        """A policy that starts from what the one before it, greedy or sampled, has learned."""
        limits = self.manifest.limits
        if self.manifest.draft is None:
            return FixedPolicy(None, max_depth=0, reason="the engine has no draft")
        table, origin = self._costs
        before = self._measured.get(sampled)
        policy = MeasuredPolicy(
            table,
            max_depth=min(limits.draft_depth, limits.draft_tokens),
            table_origin=origin,
            prior=prior_of(sampled, before.acceptance[0] if before else None),
        )
        self._measured[sampled] = self._last_measured = policy
        return policy

    @cached_property
    def _costs(self) -> tuple[CostTable, str]:
        """The cost table, measured on first use, and where it came from."""
        measurement = CostMeasurement(self.executor, self.manifest, self._kv)
        return load_or_measure(self._cost_file, measurement.run)

    def _policy(
        self, speculation: Speculation, drafter: Drafter | None, *, sampled: bool
    ) -> DraftPolicy:
        limits = self.manifest.limits
        if speculation is None:
            return FixedPolicy(None, max_depth=0, reason="asked for no draft")
        if drafter is not None:
            return self._policy_of(drafter, speculation)
        if speculation == "default":
            return self._measured_policy(sampled=sampled)
        if self.manifest.draft is None:
            raise RequestError("a draft shape is given, but the engine was built without a draft")
        check_shape(speculation, limits)
        return FixedPolicy(speculation, max_depth=speculation.draft_depth, reason="asked for")

    def _policy_of(self, drafter: Drafter, speculation: DraftShape | str) -> DraftPolicy:
        limits, name = self.manifest.limits, drafter.capabilities.name
        if "accept" not in self.manifest.roles:
            raise RequestError(f"drafter {name}: the engine was built without a draft's graphs")
        if drafter.capabilities.samples:
            raise RequestError(f"drafter {name} samples its drafts; only fixed drafts are accepted")
        shape = speculation if isinstance(speculation, DraftShape) else self.manifest.draft_default
        if shape is None:
            raise RequestError(f"drafter {name}: the engine names no default shape; give one")
        check_shape(shape, limits)
        return FixedPolicy(shape, max_depth=limits.draft_depth, reason=f"asked for {name}")

    def _request(self, prompt: Prompt, params: GenerateParams) -> Request:
        where, limit = f"prompt {prompt.id!r}", self.manifest.limits.max_seq_len
        ids = self._ids(prompt, params, where)
        if not ids:
            raise RequestError(f"{where} is empty; give at least one token")
        vocab = self.manifest.target.vocab
        outside = next((i for i in ids if not 0 <= i < vocab), None)
        if outside is not None:
            raise RequestError(f"{where}: token id {outside} is outside the vocabulary of {vocab}")
        if len(ids) >= limit:
            raise RequestError(
                f"{where} has {len(ids)} tokens, but prompt and output together may have {limit} "
                "(max_seq_len); shorten it or build the engine with a larger --max-seq-len"
            )
        if params.stop and self.text is None:
            raise RequestError(f"{where}: stop strings need a tokenizer, the engine has none")
        for stop in params.stop:
            check_unicode(stop, f"stop string {stop!r}")
        budget = min(params.max_new_tokens, limit - len(ids))
        return Request(prompt.id, ids, params, budget)

    def _ids(self, prompt: Prompt, params: GenerateParams, where: str) -> tuple[int, ...]:
        if (prompt.ids is None) == (prompt.text is None):
            raise RequestError(f"{where} must give either ids or text")
        if prompt.ids is not None:
            return tuple(prompt.ids)
        if self.text is None:
            raise RequestError(f"{where} is text, but the engine has no tokenizer; give token ids")
        assert prompt.text is not None
        if not prompt.text:
            return ()
        check_unicode(prompt.text, where)
        return self.text.encode(prompt.text, raw=params.raw)

    def _text_stream(self, request: Request) -> TextStream | None:
        return None if self.text is None else self.text.stream(request.params.stop)
