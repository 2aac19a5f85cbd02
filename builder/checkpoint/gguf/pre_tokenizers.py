"""The word splitting before byte-level BPE, by GGUF's names."""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _cased(contractions: str, digits: str, tail: str, but: str = "") -> str:
    """Return words in which capitals come first; letters of ``but`` belong to neither."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{contractions}|{before}{upper}+{lower}*{contractions}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{tail}]*|{_REST}"
    )


_GPT4O = _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}", "/")
_KIMI = r"\p{Han}+|" + _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}", "", r"&&[^\p{Han}]")
_TEKKEN = _cased("", r"\p{N}", "/")
_YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    _cased(f"{_CONTRACTIONS}?", r"\p{N}", "/"),
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    # Letters with case.
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")


@dataclass(frozen=True)
class PreTokenizer:
    """Regular expressions that split in sequence, and further settings.

    ``whole_words`` that are tokens are not split, whatever the merges. ``composed`` text is first
    normalized to Unicode's form NFC. ``begins`` is whether a text begins with BOS if no key states
    it.
    """

    cuts: tuple[str, ...]
    whole_words: bool = False
    composed: bool = False
    begins: bool = False


_LLAMA = PreTokenizer((_LLAMA3,), whole_words=True, begins=True)
PRE_TOKENIZERS = {
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "glm4": PreTokenizer((_LLAMA3,)),
    "chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,), composed=True),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,), composed=True),
    "gpt-4o": PreTokenizer((_GPT4O,), whole_words=True),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, begins=True),
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
    "refact": PreTokenizer((r"\p{N}", _GPT2)),
    "olmo": PreTokenizer((_GPT2,)),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "minimax-m2": PreTokenizer((_GPT4O,)),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "deepseek-v3": PreTokenizer(_DEEPSEEK_V3),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "youtu": PreTokenizer(_YOUTU, whole_words=True),
}
