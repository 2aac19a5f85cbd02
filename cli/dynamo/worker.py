"""An engine as a worker of NVIDIA Dynamo, whose frontend and router exchange token ids with it.

Imported only by ``specbuild dynamo``: it needs the package ``ai-dynamo``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.publisher import ComponentSnapshot, ZmqSource
from dynamo.common.backend.run import run
from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.utils.token_ids import token_ids_to_list

from specbuild.cli.dynamo.requests import chunk_of, params_of
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.request import Prompt
from specbuild.runtime.serve.kv_events import EventEndpoints, KvEventPublisher
from specbuild.runtime.serve.service import Service, ServiceOptions
from specbuild.runtime.settings import RuntimeSettings

_EVENTS = EventEndpoints("tcp://127.0.0.1:*")


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The settings of a worker; the frontend reads the tokenizer in the folder ``model``.

    ``namespace``, ``component`` and ``endpoint`` name the worker; ``discovery`` and ``event_plane``
    are settings of Dynamo. Without ``prefix_cache`` no pages are cached and no events are
    published.
    """

    engine: Path
    model: Path
    name: str
    namespace: str = "dynamo"
    component: str = "backend"
    endpoint: str = "generate"
    discovery: str = "etcd"
    event_plane: str | None = None
    threads: int | None = None
    max_queue: int = 256
    prefix_cache: bool = True


class DynamoEngine(LLMEngine):  # type: ignore[misc]
    """The life cycle of an engine as Dynamo's worker drives it: start, requests, cleanup."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._engine: Engine | None = None
        self._service: Service | None = None
        self._events: KvEventPublisher | None = None
        self._snapshots: Any = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[LLMEngine, WorkerConfig]:
        """Raise SpecbuildError: the command line is that of ``specbuild dynamo``."""
        del argv
        raise SpecbuildError("start a worker with 'specbuild dynamo ENGINE --model DIR'")

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the engine, and return its description for the frontend and the router."""
        del worker_id
        options = self._options
        settings = RuntimeSettings(
            threads=options.threads, prefix_caching="auto" if options.prefix_cache else "off"
        )
        engine = await asyncio.to_thread(Engine.load, options.engine, settings)
        if engine.prefixes is not None:
            self._events = KvEventPublisher(engine.prefixes, _EVENTS)
        service = ServiceOptions(names=(options.name,), max_queue=options.max_queue)
        self._engine, self._service = engine, Service(engine, service)
        limits = engine.manifest.limits
        size, pages = _blocks(engine.manifest)
        return EngineConfig(
            model=str(options.model),
            served_model_name=options.name,
            llm=LlmRegistration(
                context_length=limits.max_seq_len,
                kv_cache_block_size=size,
                total_kv_blocks=pages,
                max_num_seqs=limits.max_batch_size,
                max_num_batched_tokens=limits.max_rows,
            ),
        )

    async def generate(
        self, request: dict[str, Any], context: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield a chunk for each turn with tokens of a request. ApiError if it is refused."""
        assert self._service is not None and self._engine is not None
        ids = tuple(token_ids_to_list(request["token_ids"]))
        longest = self._engine.manifest.limits.max_seq_len - len(ids)
        params = params_of(request, longest=longest, defaults=self._engine.generation_defaults)
        logprobs = (request.get("output_options") or {}).get("logprobs") is not None
        checked = await self._service.check([Prompt(context.id(), prompt_ids=ids)], params)
        generation = self._service.generate(checked)
        try:
            async for events in generation:
                yield chunk_of(events, prompt_tokens=len(ids), logprobs=logprobs)
                if context.is_stopped():
                    return
        finally:
            generation.cancel()
            self._tell()

    async def kv_event_sources(self) -> list[ZmqSource]:
        """Return the sources of cache events for the router."""
        return [] if self._events is None else [ZmqSource(self._events.endpoint)]

    def component_metrics_dp_ranks(self) -> list[int]:
        """Return 1: there is one engine with one data-parallel rank."""
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Set the object that publishes the cache usage to the router."""
        self._snapshots = publisher

    async def cleanup(self) -> None:
        """Stop all requests, and publish the last events."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.session.abort().wait, 10.0)
        if self._events is not None:
            await asyncio.to_thread(self._events.close)
        self._engine = self._service = self._events = None

    def _tell(self) -> None:
        """Return the share of used pages."""
        if self._snapshots is None or self._engine is None:
            return
        _, pages = _blocks(self._engine.manifest)
        used = self._engine.used_pages
        snapshot = ComponentSnapshot(
            kv_used_blocks=round(used * pages),
            kv_total_blocks=pages,
            gpu_cache_usage=used,
            dp_rank=0,
        )
        self._snapshots.publish(0, snapshot)


def serve_worker(options: WorkerOptions) -> None:
    """Run a worker until a signal ends it."""

    async def made(argv: list[str] | None) -> tuple[LLMEngine, WorkerConfig]:
        del argv
        config = WorkerConfig(
            namespace=options.namespace,
            component=options.component,
            endpoint=options.endpoint,
            model_name=str(options.model),
            served_model_name=options.name,
            endpoint_types=endpoint_types(options.model),
            discovery_backend=options.discovery,
            event_plane=options.event_plane,
        )
        return DynamoEngine(options), config

    run(DynamoEngine, engine_factory=made)


def endpoint_types(model: Path) -> str:
    """Return the APIs of the frontend: chats only if the model has a chat template."""
    stored = model / "tokenizer_config.json"
    config = json.loads(stored.read_text(encoding="utf-8")) if stored.is_file() else {}
    able = config.get("chat_template") or (model / "chat_template.jinja").is_file()
    return "chat,completions" if able else "completions"


def _blocks(manifest: Manifest) -> tuple[int, int]:
    """Return the page size and the number of pages of the full-attention layers."""
    group = next(group for group in manifest.cache_groups if not group.window)
    return group.page_size, group.pages - 1
