"""A server whose engine follows a script in harmony, for clients of other projects.

The answer depends on the last message. "think" reasons first, "weather" calls a tool if there are
tools, and "slow" takes a second. The result of a tool is repeated. Other messages are greeted.
"""

from __future__ import annotations

import json
import string
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from serve.served import CONTROL, served
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from toy_model import ToyExecutor, toy_manifest

from specbuild.runtime.decode.session import EventBatch
from specbuild.runtime.engine import Engine
from specbuild.runtime.records import FinishReason, RunRecord
from specbuild.runtime.request import FinishEvent, Request, TokenEvent
from specbuild.runtime.statistics import RunCounters
from specbuild.runtime.text.codec import TextCodec

KEY = "secret"
GREETING = 'Hello, <b>you</b> & "all".'
THOUGHT = "The user greets me."
ARGUMENTS = json.dumps({"city": "Oslo"})
SLOW_S = 1.0
# Each message is a line. A line has a tool's name if there are tools.
TEMPLATE = (
    "{%- for m in messages %}{{ m.role }}:{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] %} {{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{%- endfor %}{{ '\n' }}{% endfor -%}"
    "{%- if tools %}tool is {{ tools[0].function.name }}\n{% endif -%}<|start|>assistant"
)
CHARACTERS = string.printable + "é"


def codec() -> TextCodec:
    """Return a codec with a token for each character, and harmony's control tokens."""
    control = [f"<|{name}|>" for name in CONTROL]
    tokenizer = Tokenizer(
        WordLevel({word: i for i, word in enumerate([*CHARACTERS, *control])}, unk_token="?")
    )
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens(control)
    return TextCodec(tokenizer.to_str().encode(), None, TEMPLATE.encode())


def answer(prompt: str) -> str:
    """Return the model's output after a prompt."""
    *lines, last = prompt.removesuffix("assistant").rstrip("\n").split("\n")
    tool = last.removeprefix("tool is ") if last.startswith("tool is ") else None
    request_text = lines[-1] if tool is not None and lines else last
    thinks = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
    if request_text.startswith("tool:"):
        text = f"The tool said: {request_text.removeprefix('tool:')}"
    elif "weather" in request_text and tool is not None:
        call = f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>{ARGUMENTS}"
        # The engine must end a message at its first call.
        return f"{thinks}{call}<|call|><|start|>assistant{call}<|call|>"
    else:
        text = GREETING
    final = f"<|channel|>final<|message|>{text}<|return|>"
    return thinks + final if "think" in request_text else final


@dataclass
class _Stream:
    left: threading.Event = field(default_factory=threading.Event)

    def leave(self) -> threading.Event:
        self.left.set()
        return self.left


class ScriptedSession:
    """A session whose requests follow the script, three tokens per turn."""

    def __init__(self, text: TextCodec) -> None:
        self._text = text

    def prepare(self, _setting: object, _params: object) -> None:
        """Do nothing: a script loads no programs."""

    def add(
        self, requests: Sequence[Request], _setting: object, deliver: Callable[[EventBatch], None]
    ) -> _Stream:
        """Run each request in a thread of its own."""
        stream = _Stream()
        for number, request in enumerate(requests):
            arguments = (number, request, deliver, stream.left)
            threading.Thread(target=self._run, args=arguments, daemon=True).start()
        return stream

    def _run(
        self,
        number: int,
        request: Request,
        deliver: Callable[[EventBatch], None],
        left: threading.Event,
    ) -> None:
        prompt = self._text.decode(request.prompt_ids)
        ids = self._text._tokenizer.encode(answer(prompt), special=False, most_tokens=1000)
        ids, reason = _until_the_end(list(ids), request)
        for start in range(0, len(ids), 3):
            if "slow" in prompt and left.wait(3 * SLOW_S / len(ids)):
                ids, reason = ids[:start], "abort"
                break
            tokens = ids[start : start + 3]
            deliver([TokenEvent(number, i, self._text.decode([i]), False, -0.5) for i in tokens])
        text = self._text.decode(ids)
        stats = replace(RunCounters(0).stats(len(request.prompt_ids)), output_tokens=len(ids))
        record = RunRecord(
            id=request.id,
            prompt_ids=request.prompt_ids,
            output_ids=tuple(ids),
            text=text,
            finish_reason=reason,
            stats=stats,
            logprobs=(-0.5,) * len(ids),
        )
        deliver([FinishEvent(number, record)])


def _until_the_end(ids: list[int], request: Request) -> tuple[list[int], FinishReason]:
    for count, token_id in enumerate(ids, start=1):
        if token_id in request.params.stop_token_ids:
            return ids[:count], "stop"
        if count == request.params.max_new_tokens:
            return ids[:count], "length"
    return ids, "eos"


@contextmanager
def scripted_server() -> Iterator[str]:
    """Yield the address of the server. It requires a key and accepts three requests at once."""
    text = codec()
    manifest = toy_manifest(max_seq_len=2048)
    size = len(CHARACTERS) + len(CONTROL)
    manifest = replace(manifest, target=replace(manifest.target, vocab=size))
    engine = Engine(manifest, ToyExecutor(manifest), text=text)
    engine.session = ScriptedSession(text)  # type: ignore[assignment]
    with served(engine, keys=(KEY,), parser="harmony", max_queue=0) as (url, _):
        yield url
