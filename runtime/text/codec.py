"""The engine's tokenizer and chat template: prompts in, text out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any

from specbuild.runtime.errors import EngineFileError, RequestError
from specbuild.runtime.text.chat_template import ChatTemplate
from specbuild.runtime.text.stream import Stop, TextStream
from specbuild.runtime.text.tokenizer import OpenedTokenizer, TokenDecoder

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
# No prompt may be longer, whatever the engine: who reads one from elsewhere stops here.
MAX_PROMPT_BYTES = 1 << 26
_MAX_CONFIG_BYTES = 1 << 23


class TextCodec:
    """The engine's tokenizer and, where it has one, its chat template.

    Raises EngineFileError where a file cannot be read; the template's code is left alone until a
    text is wrapped in it.
    """

    def __init__(self, tokenizer: bytes, config: bytes | None, template: bytes | None) -> None:
        self._tokenizer = OpenedTokenizer(tokenizer)
        # The text of ids without special tokens, and with them.
        self.decode = TokenDecoder(self._tokenizer, special=False)
        self.decode_all = TokenDecoder(self._tokenizer, special=True)
        self._config = _config(config)
        source = _template_of(self._config) if template is None else _utf8(template)
        self._template = None if source is None else ChatTemplate(source)

    @property
    def has_template(self) -> bool:
        """Whether text prompts are wrapped as a chat unless they are raw."""
        return self._template is not None

    @property
    def template_source(self) -> str | None:
        """The template as it is written; None where there is none."""
        return None if self._template is None else self._template.source

    @property
    def config(self) -> dict[str, Any]:
        """The tokenizer's configuration, empty without one."""
        return dict(self._config)

    @property
    def tokenizer_json(self) -> str:
        """The tokenizer as the text of a ``tokenizer.json``."""
        return self._tokenizer.description

    def with_template(self, source: str) -> TextCodec:
        """This tokenizer with another template."""
        made = copy(self)
        made._template = ChatTemplate(source)
        return made

    def token_id(self, token: str) -> int | None:
        """The id of a token, special or not; None where the vocabulary has none such."""
        return self._tokenizer.token_id(token)

    def words(self, ids: Sequence[int]) -> list[str | None]:
        """The tokens as the vocabulary spells them; None where it has none of this id."""
        return [self._tokenizer.word(token_id) for token_id in ids]

    def check_template(self) -> None:
        """Raises EngineFileError where there is a template that does not compile."""
        if self._template is not None:
            self._template.compile()

    def encode(
        self, text: str, *, raw: bool, most_tokens: int, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """Ids of ``text``: the user's turn of a chat where there is a template, else as it is.

        Without ``add_special_tokens`` a raw text has no token, such as BOS, added around it.
        Raises RequestError for text of more bytes than ``most_tokens`` tokens can have.
        """
        if raw or self._template is None:
            if add_special_tokens:
                return self._encode_raw(text, most_tokens)
            return tuple(self._tokenizer.encode(text, special=False, most_tokens=most_tokens))
        return self.encode_chat([{"role": "user", "content": text}], most_tokens=most_tokens)

    def _encode_raw(self, text: str, most_tokens: int) -> tuple[int, ...]:
        """Ids of a text with the special tokens around it, the first as ``add_bos_token`` says."""
        bos, is_added = self._bos
        if bos is not None and not is_added:
            ids = self._tokenizer.encode(text, special=True, most_tokens=max(most_tokens - 1, 0))
            return (bos, *ids)
        ids = self._tokenizer.encode(text, special=True, most_tokens=most_tokens)
        return tuple(ids[1:] if bos is None and is_added else ids)

    @cached_property
    def _bos(self) -> tuple[int | None, bool]:
        """The token that begins a raw text, and whether ``tokenizer.json`` adds one by itself.

        DeepSeek's adds none: the class of its tokenizer does, by ``add_bos_token``. A configuration
        without this flag leaves it to ``tokenizer.json``: (None, False).
        """
        flag, token = self._config.get("add_bos_token"), _token_text(self._config.get("bos_token"))
        bos = self.token_id(token) if isinstance(token, str) else None
        if not isinstance(flag, bool) or bos is None:
            return None, False
        is_added = self._tokenizer.encode("", special=True)[:1] == [bos]
        return (bos if flag else None), is_added

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        most_tokens: int,
    ) -> tuple[int, ...]:
        """Ids of a chat with the assistant's turn opened; RequestError as for ``encode``."""
        return self.encode_rendered(self.render(messages), most_tokens=most_tokens)

    def encode_rendered(
        self, chat: str, *, most_tokens: int, add_special_tokens: bool = False
    ) -> tuple[int, ...]:
        """Ids of a rendered chat, which has its special tokens; RequestError as for ``encode``."""
        check_unicode(chat, "the chat")
        special = add_special_tokens
        return tuple(self._tokenizer.encode(chat, special=special, most_tokens=most_tokens))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The chat template on these messages, with the assistant's turn opened.

        Messages with tool calls are given to the template in the form that it shows.
        ``variables`` are what else the template is told. Without ``add_generation_prompt`` no turn
        is opened; with ``continue_final_message`` the text ends with the last message's content.
        Raises RequestError where there is none, or with its own words where it refuses them.
        """
        if self._template is None:
            raise RequestError("the engine has no chat template for messages; give a prompt")
        special = {
            name: _token_text(value)
            for name, value in self._config.items()
            if name.endswith("_token") and value is not None
        }
        fitted = self._template.fitted(messages, special)
        known = {**special, **(variables or {})}
        if continue_final_message:
            return self._template.render_open(fitted, known, tools=tools)
        return self._template.render(
            fitted, known, tools=tools, add_generation_prompt=add_generation_prompt
        )

    def stream(self, stop: Stop = (), *, skip_special_tokens: bool = True) -> TextStream:
        """A fresh incremental decoder."""
        return TextStream(self.decode if skip_special_tokens else self.decode_all, stop)


def check_unicode(text: str, where: str) -> None:
    """Raises RequestError where ``text`` holds half of a surrogate pair: it has no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where} is not Unicode text: character {error.start} is a lone surrogate "
            "(a byte that is not UTF-8, or half of a \\u pair)"
        ) from error


def _utf8(template: bytes) -> str:
    try:
        return template.decode()
    except UnicodeDecodeError as error:
        raise EngineFileError(f"{CHAT_TEMPLATE_FILE} is not UTF-8: {error}") from error


def _config(data: bytes | None) -> dict[str, Any]:
    if data is None:
        return {}
    if len(data) > _MAX_CONFIG_BYTES:
        raise EngineFileError(
            f"{TOKENIZER_CONFIG_FILE} has {len(data)} bytes, at most {_MAX_CONFIG_BYTES} are read"
        )
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
