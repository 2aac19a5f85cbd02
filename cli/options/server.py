"""The options of ``specbuild serve``: its address, its names, its queue and its prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from specbuild.builder.option_group import Described, OptionGroup
from specbuild.builder.option_readers import memory_size, repeated
from specbuild.runtime.engine_dir.cache_groups import DEFAULT_SNAPSHOT_INTERVAL, SNAPSHOT_STEP
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.generate_params import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from specbuild.runtime.engine import Engine
    from specbuild.runtime.serve.service import Service


@dataclass(frozen=True, kw_only=True)
class AddressOptions(OptionGroup):
    """The address of the server, and the accepted hosts."""

    PANEL: ClassVar[str] = "Address"

    host: Annotated[str, Described("Address to listen on.", "ADDRESS")] = "127.0.0.1"
    port: Annotated[int, Described("Port; 0 selects a free port.", "N", least=0, most=65535)] = 8000
    uds: Annotated[Path | None, Described("Listen on a Unix socket instead.", "PATH")] = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        Described(
            "Accepted Host header, * for any; repeatable.",
            "HOST",
            shown="loopback names on a loopback address, else any",
            typed=list[str],
            read=repeated,
        ),
    ] = ()
    api_key: Annotated[
        tuple[str, ...],
        Described("Required API key; repeatable.", "KEY", typed=list[str], read=repeated),
    ] = ()
    api_key_file: Annotated[Path | None, Described("File with API keys, one per line.", "FILE")] = (
        None
    )
    cors: Annotated[
        tuple[str, ...],
        Described(
            "Allow cross-origin requests from this origin; repeatable.",
            "ORIGIN",
            typed=list[str],
            read=repeated,
        ),
    ] = ()

    ssl_certfile: Annotated[
        Path | None, Described("Serve HTTPS with this certificate chain (PEM).", "FILE")
    ] = None
    ssl_keyfile: Annotated[
        Path | None, Described("Private key of the certificate, if it is not in its file.", "FILE")
    ] = None
    no_page: Annotated[bool, Described("Disable the chat page at /.")] = False


@dataclass(frozen=True, kw_only=True)
class ModelOptions(OptionGroup):
    """What clients see of the engine."""

    PANEL: ClassVar[str] = "Model"

    served_model_name: Annotated[
        tuple[str, ...],
        Described(
            "Name of the model in the API; repeatable.",
            "NAME",
            shown="the name of the engine directory",
            typed=list[str],
            read=repeated,
        ),
    ] = ()
    chat_template: Annotated[
        Path | None, Described("Jinja chat template that replaces the engine's.", "FILE")
    ] = None
    reasoning_parser: Annotated[
        str,
        Described("Format of reasoning: auto, harmony, think, mistral, gemma4 or none.", "PARSER"),
    ] = "auto"
    tool_call_parser: Annotated[
        str,
        Described(
            "Format of tool calls: auto, harmony, hermes, qwen3_coder, deepseek3, deepseek31, "
            "kimi2, glm47, minimax, mistral, gemma4, llama3_json, pythonic or none; also vLLM's "
            "and SGLang's names.",
            "PARSER",
        ),
    ] = "auto"

    trust_request_chat_template: Annotated[
        bool, Described("Let a request bring its own chat template (`chat_template`).")
    ] = False
    enable_force_include_usage: Annotated[
        bool, Described("Send token counts with every stream, as by `stream_options`.")
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, Described("Name tokens of log-probabilities `token_id:ID`, for all requests.")
    ] = False
    max_logprobs: Annotated[
        int,
        Described(
            "Maximum of `logprobs`, `top_logprobs` and `prompt_logprobs`.", "N",
            least=0, most=MAX_TOP_LOGPROBS,
        ),
    ] = MAX_TOP_LOGPROBS  # fmt: skip

    @property
    def answer_settings(self) -> dict[str, bool]:
        """What the server adds to all answers."""
        return {
            "forces_usage": self.enable_force_include_usage,
            "tokens_as_ids": self.return_tokens_as_token_ids,
        }

    @property
    def template(self) -> str | None:
        """The text of ``--chat-template``; SpecbuildError if the file cannot be read."""
        file = self.chat_template
        return None if file is None else read_option_file(file, "--chat-template")


@dataclass(frozen=True, kw_only=True)
class QueueOptions(OptionGroup):
    """Limits and logs of requests."""

    PANEL: ClassVar[str] = "Queue"

    max_queue: Annotated[
        int,
        Described("Maximum number of waiting sequences; further requests get 429.", "N", least=0),
    ] = 256
    log_requests: Annotated[bool, Described("Print one line per request to standard error.")] = (
        False
    )
    log_format: Annotated[
        Literal["text", "json"], Described("Format of the request lines: text or json.", "FORMAT")
    ] = "text"
    log_stats: Annotated[
        bool, Described("Print throughput to standard error every 10 seconds while requests run.")
    ] = False

    def logged(
        self, service: Service, write: Callable[[str], None]
    ) -> AbstractContextManager[object]:
        """Log throughput while the context is open, if requested."""
        if not self.log_stats:
            return nullcontext()
        from specbuild.runtime.serve.throughput_log import ThroughputLog

        return ThroughputLog(service, write)


@dataclass(frozen=True, kw_only=True)
class PrefixOptions(OptionGroup):
    """What is cached of prompts for later ones with the same prefix."""

    PANEL: ClassVar[str] = "Prefix cache"

    no_prefix_cache: Annotated[bool, Described("Disable prefix caching.")] = False
    publish_generated_pages: Annotated[
        bool, Described("Also cache the pages of outputs; the last bits may differ from prefill.")
    ] = False
    state_snapshot_memory: Annotated[
        int | None,
        Described(
            "Host memory for snapshots of recurrent states, for example 2GiB.",
            "SIZE",
            least=0,
            shown="4 GiB on CUDA, 0 on the CPU",
            typed=str,
            read=memory_size,
        ),
    ] = None
    state_snapshot_interval: Annotated[
        int,
        Described("Tokens between two snapshots, a multiple of 64.", "N", least=SNAPSHOT_STEP),
    ] = DEFAULT_SNAPSHOT_INTERVAL

    def __post_init__(self) -> None:
        if self.no_prefix_cache and self.publish_generated_pages:
            raise SpecbuildError(
                "--no-prefix-cache keeps nothing: leave --publish-generated-pages out"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """Return the engine's settings, by name."""
        return {
            "prefix_caching": "off" if self.no_prefix_cache else "auto",
            "publish_generated_pages": self.publish_generated_pages,
            "state_snapshot_memory": self.state_snapshot_memory,
            "state_snapshot_interval": self.state_snapshot_interval,
        }


@dataclass(frozen=True, kw_only=True)
class EventOptions(OptionGroup):
    """Publication of the prefix cache's contents."""

    PANEL: ClassVar[str] = "Prefix cache"

    kv_events: Annotated[
        str | None,
        Described("Publish cache events over ZeroMQ in vLLM's format.", "ENDPOINT"),
    ] = None
    kv_events_replay: Annotated[
        str | None, Described("Endpoint from which subscribers request missed events.", "ENDPOINT")
    ] = None
    kv_events_topic: Annotated[str, Described("Topic of the cache events.", "TOPIC")] = ""

    def __post_init__(self) -> None:
        if self.kv_events is None and (self.kv_events_replay or self.kv_events_topic):
            raise SpecbuildError("--kv-events-replay and --kv-events-topic need --kv-events")

    def published(self, engine: Engine) -> AbstractContextManager[object]:
        """Publish while the context is open. SpecbuildError without a prefix cache or address."""
        if self.kv_events is None:
            return nullcontext()
        if engine.prefixes is None:
            raise SpecbuildError(
                "--kv-events publishes the prefix cache, which is disabled on this server"
            )
        if missing := [name for name in ("zmq", "msgspec") if find_spec(name) is None]:
            raise SpecbuildError(
                f"--kv-events needs {missing[0]}: pip install '.[events]' in the checkout"
            )
        from specbuild.runtime.serve.kv_events import EventEndpoints, KvEventPublisher

        place = EventEndpoints(self.kv_events, self.kv_events_replay, self.kv_events_topic)
        return KvEventPublisher(engine.prefixes, place)


def read_option_file(file: Path, flag: str) -> str:
    """Return the text of the file that an option names. SpecbuildError if it cannot be read."""
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecbuildError(f"{flag} {file}: {error}") from error
