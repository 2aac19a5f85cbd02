"""The tokens of a GGUF file, and what its keys say of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specbuild.builder.checkpoint.gguf.keys import NumberArray, TextArray, Value
from specbuild.runtime.errors import SpecbuildError

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
_MAX_CHARACTERS = 1 << 10
_NO_MODEL = (None, "none", "no_vocab")

# A file names one of each kind, models have more.
_NAMED_ENDS = ("eos", "eot", "eom")
_KNOWN_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|user|>",
    "<|observation|>",
    "<｜end▁of▁sentence｜>",
    "<end_of_turn>",
    "<|eot|>",
)
# In OpenAI's format this token ends a message, and an answer may have several.
_MESSAGE_END, _ANSWER_ENDS = "<|end|>", ("<|return|>", "<|call|>")


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, and their ``kinds``; ``named`` are ids by names such as ``bos``.

    ``flags`` are keys that say yes or no.
    """

    where: str
    model: str
    tokens: list[str]
    kinds: list[int]
    keys: Mapping[str, Value] = field(repr=False)

    def named(self, name: str) -> int | None:
        """The id that the key ``NAME_token_id`` holds. SpecbuildError where it is none."""
        value = self.keys.get(f"{PREFIX}{name}_token_id")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong(self.where, f"{name}_token_id", "a token's id")
        # Files without such a token have been seen with an id that is none.
        return value if 0 <= value < len(self.tokens) else None

    def flag(self, name: str, default: bool) -> bool:
        """What a key says that is true or false."""
        value = self.keys.get(f"{PREFIX}{name}", default)
        if not isinstance(value, bool):
            raise _wrong(self.where, name, "true or false")
        return value

    def texts(self, name: str) -> list[str]:
        """The texts of an array. SpecbuildError where there is none."""
        value = self.keys.get(f"{PREFIX}{name}")
        if not isinstance(value, TextArray):
            raise _wrong(self.where, name, "an array of texts")
        return value.values()

    def scores(self) -> list[float]:
        """What every token is worth."""
        value = self.keys.get(f"{PREFIX}scores")
        if not isinstance(value, NumberArray) or value.count != len(self.tokens):
            raise _wrong(self.where, "scores", f"{len(self.tokens)} numbers")
        found: list[float] = value.values().tolist()
        return found

    def of_kind(self, *kinds: int) -> dict[str, int]:
        """The tokens of these kinds, with their ids."""
        return {
            token: number
            for number, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind in kinds
        }


def read_vocabulary(where: str, keys: Mapping[str, Value], most_tokens: int) -> Vocabulary | None:
    """The tokens of a file, None where it has none.

    Raises SpecbuildError where there are more than the embedding has rows, or one stands twice.
    """
    model = keys.get(f"{PREFIX}model")
    if model in _NO_MODEL:
        return None
    if not isinstance(model, str):
        raise _wrong(where, "model", "a name")
    listed = keys.get(f"{PREFIX}tokens")
    if not isinstance(listed, TextArray):
        raise _wrong(where, "tokens", "an array of texts")
    if listed.count > most_tokens:
        raise SpecbuildError(
            f"{where}: names {listed.count} tokens, but its embedding has {most_tokens} rows; the "
            "file is damaged, download it again"
        )
    tokens = listed.values()
    longest = max(tokens, key=len, default="")
    if len(longest) > _MAX_CHARACTERS:
        raise SpecbuildError(
            f"{where}: a token of its vocabulary has {len(longest)} characters, at most "
            f"{_MAX_CHARACTERS} are read; the file is damaged, download it again"
        )
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise SpecbuildError(f"{where}: the token {twice!r} stands twice in its vocabulary")
    return Vocabulary(where, model, tokens, _kinds(where, keys, len(tokens)), keys)


def _kinds(where: str, keys: Mapping[str, Value], count: int) -> list[int]:
    value = keys.get(f"{PREFIX}token_type")
    if value is None:
        return [NORMAL] * count
    if not isinstance(value, NumberArray) or value.count != count:
        raise _wrong(where, "token_type", f"{count} numbers")
    found: list[int] = value.values().tolist()
    return found


def _wrong(where: str, name: str, expected: str) -> SpecbuildError:
    return SpecbuildError(f"{where}: {PREFIX}{name}: expected {expected}")


def end_tokens(vocabulary: Vocabulary) -> list[int]:
    """Return ids, the model's own first."""
    controls = vocabulary.of_kind(CONTROL)
    named = [vocabulary.named(name) for name in _NAMED_ENDS]
    found = [number for number in named if number is not None]
    harmony = all(end in controls for end in _ANSWER_ENDS)
    known = [text for text in _KNOWN_ENDS if not (harmony and text == _MESSAGE_END)]
    found += [controls[text] for text in known if text in controls]
    return list(dict.fromkeys(found))
