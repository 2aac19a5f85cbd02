"""The tokenizer of an engine, as a program uses it beside requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbuild.runtime.text.codec import MAX_PROMPT_BYTES, TextCodec


@dataclass(frozen=True, repr=False)
class EngineTokenizer:
    """Converts text to token ids and back as the engine does.

    >>> ids = engine.tokenizer.encode("def area(radius):")
    >>> engine.tokenizer.decode(ids)
    'def area(radius):'
    """

    codec: TextCodec
    vocab: int

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text, without the chat template.

        ``add_special_tokens`` adds those that begin and end a text, such as BOS. Raises
        RequestError for text that is not Unicode.
        """
        return self.codec.encode(
            text,
            raw=True,
            most_tokens=MAX_PROMPT_BYTES,
            add_special_tokens=add_special_tokens,
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self.codec.decode(ids) if skip_special_tokens else self.codec.decode_all(ids)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a chat; RequestError where the engine has no chat template."""
        return self.codec.render(messages, add_generation_prompt=add_generation_prompt)

    def __len__(self) -> int:
        """The size of the vocabulary."""
        return self.vocab

    def __repr__(self) -> str:
        template = "with" if self.codec.has_template else "without"
        return f"EngineTokenizer({self.vocab} tokens, {template} chat template)"
