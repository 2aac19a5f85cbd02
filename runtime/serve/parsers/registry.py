"""Which parsers there are, and which one an engine's tokenizer and template ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specbuild.runtime.errors import RequestError
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.serve.parsers.arguments import Tools
from specbuild.runtime.serve.parsers.asked_form import AskedForm, harmony_guide, marked_guide
from specbuild.runtime.serve.parsers.call_forms import CALL_FORMS, CallForm, CallId, form_of
from specbuild.runtime.serve.parsers.harmony import CONTROL_TOKENS, HarmonyParser
from specbuild.runtime.serve.parsers.marked import THINK, MarkedParser, Thought, thought_of
from specbuild.runtime.serve.parsers.parser import ChatPrompt, OutputParser, TextParser
from specbuild.runtime.text.codec import TextCodec
from specbuild.runtime.text.stream import Stop

# Both options take these names; "auto" goes by the engine's template.
REASONING_PARSERS = ("auto", "harmony", "think", "none")
TOOL_CALL_PARSERS = ("auto", "harmony", *CALL_FORMS, "none")
_NO_PROMPT = ChatPrompt()
_HARMONY_TURN = "<|start|>assistant"


class ParserForm(Protocol):
    """Makes the parser of one output."""

    calls_tools: bool
    """Whether it finds calls of tools."""

    stop_token_ids: tuple[int, ...]
    """Tokens that end a turn, beside the model's own ends of sequence."""

    call_id: CallId | None
    """Makes ids of calls, of the function's name and the number of calls before; None: any id."""

    def parser(
        self,
        stop: Stop,
        tools: Tools = (),
        prompt: ChatPrompt = _NO_PROMPT,
        *,
        skip_special_tokens: bool = True,
    ) -> OutputParser:
        """Return a parser of the output that continues ``prompt`` and may call ``tools``.

        Where marks are special tokens, content may have special tokens in any case.
        """
        ...

    def guided(self, asked: AskedForm, prompt: ChatPrompt = _NO_PROMPT) -> Guide:
        """Return the guide of full outputs whose content, or calls, are what is asked."""
        ...


class TextForm:
    """Outputs that are text alone."""

    calls_tools = False
    call_id: CallId | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def parser(
        self,
        stop: Stop,
        tools: Tools = (),
        prompt: ChatPrompt = _NO_PROMPT,
        *,
        skip_special_tokens: bool = True,
    ) -> OutputParser:
        """See :class:`ParserForm`."""
        del tools, prompt
        codec = self._codec
        return TextParser(codec.decode if skip_special_tokens else codec.decode_all, stop)

    def guided(self, asked: AskedForm, prompt: ChatPrompt = _NO_PROMPT) -> Guide:
        """Return the content's guide: nothing is around it."""
        del prompt
        assert asked.content is not None
        return asked.content


class HarmonyForm:
    """Harmony, by the engine's own control tokens. RequestError where it lacks one."""

    calls_tools = True
    call_id: CallId | None = None

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        found = {name: codec.token_id(f"<|{name}|>") for name in CONTROL_TOKENS}
        missing = [name for name, token_id in found.items() if token_id is None]
        if missing:
            raise RequestError(
                f"the harmony parser needs the token <|{missing[0]}|>, which the engine's "
                "tokenizer has not"
            )
        self._control = {name: token_id for name, token_id in found.items() if token_id is not None}
        # One call a turn: its end is the turn's.
        self.stop_token_ids: tuple[int, ...] = (self._control["call"], self._control["return"])

    def parser(
        self,
        stop: Stop,
        tools: Tools = (),
        prompt: ChatPrompt = _NO_PROMPT,
        *,
        skip_special_tokens: bool = True,
    ) -> OutputParser:
        """See :class:`ParserForm`."""
        del tools
        codec = self._codec
        decode = codec.decode if skip_special_tokens else codec.decode_all
        parser = HarmonyParser(self._control, decode, stop)
        # A turn that the prompt has begun, such as an open message of the final channel.
        _, _, begun = prompt.text.rpartition(_HARMONY_TURN)
        if begun:
            parser.skip(self._codec.encode_rendered(begun, most_tokens=len(begun.encode())))
        return parser

    def guided(self, asked: AskedForm, prompt: ChatPrompt = _NO_PROMPT) -> Guide:
        """Return one grammar of all channels."""
        del prompt
        return harmony_guide(self._control, asked)


class MarkedForm:
    """Marks in the text."""

    stop_token_ids: tuple[int, ...] = ()

    def __init__(
        self, codec: TextCodec, *, thinks: bool, calls: CallForm | None, eos: Sequence[int]
    ) -> None:
        self._codec = codec
        self._thinks, self._calls = thinks, calls
        self.calls_tools = calls is not None
        self.call_id = None if calls is None else calls.call_id
        self._eos = tuple(eos)

    def parser(
        self,
        stop: Stop,
        tools: Tools = (),
        prompt: ChatPrompt = _NO_PROMPT,
        *,
        skip_special_tokens: bool = True,
    ) -> OutputParser:
        """See :class:`ParserForm`."""
        return MarkedParser(
            self._codec.decode_all,
            stop,
            thought=self._thought(prompt),
            calls=None if self._calls is None else self._calls.after(prompt.num_past_calls),
            tools=tools,
            dropped=self._eos if skip_special_tokens else (),
        )

    def guided(self, asked: AskedForm, prompt: ChatPrompt = _NO_PROMPT) -> Guide:
        """Return a grammar of the reasoning, if any, and of the answer or the calls."""
        token_id, thought = self._codec.token_id, self._thought(prompt)
        return marked_guide(token_id, asked, thought=thought, calls=self._calls)

    def _thought(self, prompt: ChatPrompt) -> Thought | None:
        return thought_of(prompt) if self._thinks else None


def parser_form(
    codec: TextCodec, eos_token_ids: Sequence[int], *, reasoning: str, tool_calls: str
) -> ParserForm:
    """The form by the names of two parsers. RequestError where there are no such."""
    for option, given, known in (
        ("--reasoning-parser", reasoning, REASONING_PARSERS),
        ("--tool-call-parser", tool_calls, TOOL_CALL_PARSERS),
    ):
        if given not in known:
            raise RequestError(f"{option} is {given!r}, must be one of {', '.join(known)}")
    template = codec.template_source or ""
    if reasoning == "auto":
        harmony = "<|channel|>" in template
        reasoning = "harmony" if harmony else "think" if THINK in template else "none"
    if tool_calls == "auto":
        tool_calls = "harmony" if reasoning == "harmony" else form_of(template)
    if "harmony" in (reasoning, tool_calls):
        if {reasoning, tool_calls} - {"harmony", "none"}:
            raise RequestError(
                f"--reasoning-parser {reasoning} and --tool-call-parser {tool_calls} do not go "
                "together: harmony reads both"
            )
        return HarmonyForm(codec)
    thinks, calls = reasoning == "think", CALL_FORMS.get(tool_calls)
    if not thinks and calls is None:
        return TextForm(codec)
    return MarkedForm(codec, thinks=thinks, calls=calls, eos=eos_token_ids)
