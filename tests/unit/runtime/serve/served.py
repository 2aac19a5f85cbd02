"""A toy engine with a tokenizer, served over a real socket by a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from toy_engine import toy_engine
from toy_model import VOCAB

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.engine import Engine
from specbuild.runtime.serve.app import App, AppOptions
from specbuild.runtime.serve.parsers.output_formats import output_format
from specbuild.runtime.serve.server import Address, Server
from specbuild.runtime.serve.service import ServiceOptions
from specbuild.runtime.text.codec import TextCodec

NAME = "toy"
CONTROL = ("start", "channel", "message", "end", "return", "call", "constrain")
# A letter for each id, the last of them control tokens; 28 ends a sequence.
LETTERS = [chr(ord("a") + i) for i in range(VOCAB - len(CONTROL) - 1)]
TEMPLATE = (
    "{%- for m in messages %}{{ m.content or 'a' }}"
    "{%- for c in m.tool_calls or () %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endfor -%}"
    "{%- if tools %}b{% endif -%}<|start|>"
)


class PlainDecoder:
    """Decodes ids with a function. Each id adds the new complete characters."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode

    def __call__(self, ids: Sequence[int], /) -> str:
        return self._decode(ids)

    def steps(self) -> Callable[[int], str | None]:
        ids: list[int] = []
        num_characters = 0

        def step(token_id: int) -> str | None:
            nonlocal num_characters
            ids.append(token_id)
            text = self._decode(ids)
            if text.endswith("\ufffd") or len(text) <= num_characters:
                return None
            new, num_characters = text[num_characters:], len(text)
            return new

        return step


def toy_codec(template: str | None = None) -> TextCodec:
    """Return a tokenizer whose tokens are letters and harmony's control tokens."""
    control = [f"<|{name}|>" for name in CONTROL]
    words = [*LETTERS, *control, "<eos>"]
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="a"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([*control, "<eos>"])
    source = None if template is None else template.encode()
    return TextCodec(tokenizer.to_str().encode(), None, source)


def worded(template: str | None = None, **options: Any) -> Engine:
    """Return a toy engine with a tokenizer."""
    return toy_engine(text=toy_codec(template), **options)


@contextmanager
def served(
    engine: Engine,
    *,
    max_queue: int = 64,
    keys: tuple[str, ...] = (),
    parser: str = "none",
    origins: tuple[str, ...] = (),
    hosts: tuple[str, ...] = (),
    log_requests: bool = False,
    page: bool = True,
    setting: DraftSetting | None = None,
    max_logprobs: int = 20,
    trusts_templates: bool = False,
    log_json: bool = False,
    address: Address | None = None,
    forces_usage: bool = False,
    tokens_as_ids: bool = False,
) -> Iterator[tuple[str, App]]:
    """Yield the address of a server, and its application."""
    form = None
    if engine.text is not None:
        eos = engine.manifest.target.eos_token_ids
        form = output_format(engine.text, eos, reasoning=parser, tool_calls="auto")
    service = ServiceOptions(
        names=(NAME, "other-name"),
        max_queue=max_queue,
        setting=setting or DraftSetting(),
        max_logprobs=max_logprobs,
        trusts_templates=trusts_templates,
        forces_usage=forces_usage,
        tokens_as_ids=tokens_as_ids,
    )
    options = AppOptions(
        service=service,
        output_format=form,
        keys=keys,
        origins=origins,
        hosts=hosts,
        log_requests=log_requests,
        log_json=log_json,
        page=page,
    )
    app = App(engine, options)
    started, place = threading.Event(), []

    def ready(name: object) -> None:
        place.append(name)
        started.set()

    address = address or Address(port=0)
    server = Server(app, ready=ready, address=address)
    socket = address.listen()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    try:
        assert started.wait(300)
        yield f"{address.scheme}://127.0.0.1:{place[0][1]}", app
    finally:
        server.should_exit = True
        thread.join(30)
        socket.close()
        assert not thread.is_alive()
