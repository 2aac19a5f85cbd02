"""Text to ids and back: tokenizer, chat template, and streams without broken characters."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from specbuild.runtime.errors import EngineFileError, RequestError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"

_INCOMPLETE = "\ufffd"  # what a decoder gives for the first bytes of a longer character


class TextCodec:
    """The engine's tokenizer and, where it has one, its chat template."""

    def __init__(self, tokenizer: bytes, config: bytes | None, template: bytes | None) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_str(tokenizer.decode())
        except Exception as error:  # the library raises bare Exception
            raise EngineFileError(f"{TOKENIZER_FILE} is not a tokenizer: {error}") from error
        self._config = _config(config)
        source = _template_of(self._config) if template is None else _utf8(template)
        self._template = None if source is None else _compiled(source)

    @property
    def has_template(self) -> bool:
        """Whether text prompts are wrapped as a chat unless they are raw."""
        return self._template is not None

    def encode(self, text: str, *, raw: bool) -> tuple[int, ...]:
        """Ids of ``text``: the user's turn of a chat where there is a template, else as it is."""
        if raw or self._template is None:
            return tuple(self._tokenizer.encode(text).ids)
        chat = self.render([{"role": "user", "content": text}])
        return tuple(self._tokenizer.encode(chat, add_special_tokens=False).ids)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The chat template on these messages, with the assistant's turn opened.

        Raises RequestError with the template's own words where it refuses them.
        """
        assert self._template is not None
        special = {
            name: _token_text(value)
            for name, value in self._config.items()
            if name.endswith("_token") and value is not None
        }
        try:
            text: str = self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None, **special
            )
        except Exception as error:  # foreign code, in a sandbox: it may raise whatever it likes
            raise RequestError(f"the chat template refuses the prompt: {error}") from error
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def stream(self, stop: Sequence[str] = ()) -> TextStream:
        """A fresh incremental decoder."""
        return TextStream(self.decode, stop)


class Detokenizer:
    """Text of ids that come one at a time; a character appears when its last byte is there.

    Only the ids since the last complete character are decoded again, behind enough context
    that a decoder which strips leading space does not strip the middle of the text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._context = 0
        self._read = 0

    def push(self, token_id: int) -> str:
        """The text that this id completes, possibly none."""
        self._ids.append(token_id)
        before, text = self._texts()
        if text.endswith(_INCOMPLETE) or len(text) <= len(before):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def flush(self) -> str:
        """What is left at the end: an unfinished character shows as a replacement character."""
        before, text = self._texts()
        self._context = self._read = len(self._ids)
        return text[len(before) :]

    def _texts(self) -> tuple[str, str]:
        before = self._decode(self._ids[self._context : self._read])
        return before, self._decode(self._ids[self._context :])


class TextStream:
    """A request's text: incremental, ending before the first stop string.

    Text that may turn out to begin a stop string is held back until that is decided.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stop = tuple(stop)
        self._held = ""
        self._parts: list[str] = []
        self.stopped = False

    @property
    def emitted(self) -> str:
        """All text given out so far."""
        return "".join(self._parts)

    def push(self, token_id: int) -> str:
        """Text to give out with this token; ``stopped`` turns true where it completes a stop."""
        return self._advance(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        if self.stopped:
            return ""
        rest = self._advance(self._detokenizer.flush())
        if self.stopped:
            return rest
        held, self._held = self._held, ""
        self._parts.append(held)
        return rest + held

    def _advance(self, new: str) -> str:
        text = self._held + new
        found = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if found:
            self.stopped = True
            text, self._held = text[: min(found)], ""
        else:
            keep = max((_overlap(text, stop) for stop in self._stop), default=0)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self._parts.append(text)
        return text


def check_unicode(text: str, where: str) -> None:
    """Raises RequestError where ``text`` holds half of a surrogate pair: it has no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where} is not Unicode text: character {error.start} is a lone surrogate "
            "(a byte that is not UTF-8, or half of a \\u pair)"
        ) from error


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def _utf8(template: bytes) -> str:
    try:
        return template.decode()
    except UnicodeDecodeError as error:
        raise EngineFileError(f"{CHAT_TEMPLATE_FILE} is not UTF-8: {error}") from error


def _config(data: bytes | None) -> dict[str, Any]:
    if data is None:
        return {}
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise EngineFileError(f"{TOKENIZER_CONFIG_FILE} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise EngineFileError(f"{TOKENIZER_CONFIG_FILE} holds no object")
    return config


def _template_of(config: Mapping[str, Any]) -> str | None:
    """The template of an older tokenizer config: a string, or a list of named ones."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = (entry for entry in template if isinstance(entry, dict))
        template = next((e.get("template") for e in named if e.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _token_text(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def _compiled(source: str) -> Any:
    """The template in the sandbox and with the globals that Hugging Face templates expect."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what training learns from: here it is transparent."""

        tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 reads

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda spec: datetime.now().strftime(spec)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise EngineFileError(f"the chat template does not compile: {error}") from error
