"""The output formats, and their selection by the engine's tokenizer and template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specbuild.runtime.errors import RequestError
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.guides.reasoning_budget import ReasoningBudget
from specbuild.runtime.serve.parsers.arguments import Tools
from specbuild.runtime.serve.parsers.call_outputs import CALL_STYLES, CallOutputFormat
from specbuild.runtime.serve.parsers.harmony import CONTROL_TOKENS, HarmonyParser
from specbuild.runtime.serve.parsers.marker_parser import MarkerParser
from specbuild.runtime.serve.parsers.output_constraint import (
    OutputConstraint,
    harmony_guide,
    marker_guide,
)
from specbuild.runtime.serve.parsers.parser import ChatPrompt, OutputParser, TextParser
from specbuild.runtime.serve.parsers.reasoning import (
    REASONING_MARKERS,
    THINK,
    ReasoningMarkers,
    ReasoningState,
    detect_reasoning,
    reasoning_state,
)
from specbuild.runtime.serve.parsers.tool_call_formats import (
    TOOL_CALL_FORMATS,
    MakeCallId,
    ToolCallFormat,
    detect_tool_call_format,
)
from specbuild.runtime.text.codec import TextCodec
from specbuild.runtime.text.stream import Stop

# Values of the two options; "auto" selects by the engine's template.
REASONING_PARSERS = ("auto", "harmony", *REASONING_MARKERS, "none")
TOOL_CALL_PARSERS = ("auto", "harmony", *TOOL_CALL_FORMATS, *CALL_STYLES, "none")
# Names of vLLM and SGLang for the same formats.
REASONING_ALIASES = {
    "openai_gptoss": "harmony",
    "gpt-oss": "harmony",
    **dict.fromkeys(
        (
            "deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3", "glm45", "glm47", "holo2",
            "kimi_k2", "kimi", "minimax_m2", "minimax", "mimo", "olmo3", "qwen3", "qwen3-thinking",
            "nemotron_v3",
        ),
        "think",
    ),
}  # fmt: skip
TOOL_CALL_ALIASES = {
    "openai": "harmony",
    "gpt-oss": "harmony",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
    "mimo": "qwen3_coder",
    "deepseek_v3": "deepseek3",
    "deepseekv3": "deepseek3",
    "deepseek_v31": "deepseek31",
    "deepseekv31": "deepseek31",
    "kimi_k2": "kimi2",
    "glm": "glm47",
    "glm45": "glm47",
    "minimax_m2": "minimax",
    "minimax-m2": "minimax",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
}
_NO_PROMPT = ChatPrompt()
_HARMONY_TURN = "<|start|>assistant"


class OutputFormat(Protocol):
    """The format of a model's outputs, which creates parsers and guides."""

    supports_tools: bool
    """Whether outputs may contain tool calls."""

    stop_token_ids: tuple[int, ...]
    """Tokens that end a turn in addition to the model's ends of sequence."""

    limits_reasoning: bool
    """Whether :meth:`reasoning_budget` returns a limit."""

    call_id: MakeCallId | None
    """Returns the id of a call from the function's name and the number of earlier calls.

    It is None if any id will do.
    """

    def parser(
        self,
        stop: Stop,
        tools: Tools = (),
        prompt: ChatPrompt = _NO_PROMPT,
        *,
        skip_special_tokens: bool = True,
    ) -> OutputParser:
        """Return a parser of the output that continues ``prompt`` and may call ``tools``.

        Without ``tools`` markers of calls are content, as in vLLM with ``tool_choice: "none"``.
        If markers are special tokens, content may contain special tokens despite
        ``skip_special_tokens``.
        """
        ...

    def guide(self, constraint: OutputConstraint, prompt: ChatPrompt = _NO_PROMPT) -> Guide:
        """Return the guide of complete outputs under a constraint."""
        ...

    def reasoning_budget(self, tokens: int, prompt: ChatPrompt) -> ReasoningBudget | None:
        """Return a limit of reasoning; None if outputs have none, or no marker that is a token."""
        ...


class TextFormat:
    """Outputs that consist of content only."""

    supports_tools = False
    limits_reasoning = False
    call_id: MakeCallId | None = None
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
        """See :class:`OutputFormat`."""
        del tools, prompt
        codec = self._codec
        return TextParser(codec.decode if skip_special_tokens else codec.decode_all, stop)

    def guide(self, constraint: OutputConstraint, prompt: ChatPrompt = _NO_PROMPT) -> Guide:
        """Return the content's guide, since there is nothing else."""
        del prompt
        assert constraint.content is not None
        return constraint.content

    def reasoning_budget(self, tokens: int, prompt: ChatPrompt) -> ReasoningBudget | None:
        """Return None: there is no reasoning."""
        del tokens, prompt
        return None


class HarmonyFormat:
    """Harmony, with the engine's control tokens. RequestError if the tokenizer lacks one."""

    supports_tools = True
    limits_reasoning = True
    call_id: MakeCallId | None = None

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        token_ids = {name: codec.token_id(f"<|{name}|>") for name in CONTROL_TOKENS}
        missing = [name for name, token_id in token_ids.items() if token_id is None]
        if missing:
            raise RequestError(
                f"the harmony parser needs the token <|{missing[0]}|>, which the engine's "
                "tokenizer lacks"
            )
        self._control = {
            name: token_id for name, token_id in token_ids.items() if token_id is not None
        }
        # A turn has one call, whose end also ends the turn.
        self.stop_token_ids: tuple[int, ...] = (self._control["call"], self._control["return"])

    def parser(
        self,
        stop: Stop,
        tools: Tools = (),
        prompt: ChatPrompt = _NO_PROMPT,
        *,
        skip_special_tokens: bool = True,
    ) -> OutputParser:
        """See :class:`OutputFormat`."""
        del tools
        codec = self._codec
        decode = codec.decode if skip_special_tokens else codec.decode_all
        parser = HarmonyParser(self._control, decode, stop)
        # The prompt may contain the start of the turn, such as an open message.
        _, _, turn = prompt.text.rpartition(_HARMONY_TURN)
        if turn:
            parser.skip(self._codec.encode_rendered(turn, most_tokens=len(turn.encode())))
        return parser

    def guide(self, constraint: OutputConstraint, prompt: ChatPrompt = _NO_PROMPT) -> Guide:
        """Return a grammar of all channels."""
        del prompt
        return harmony_guide(self._control, constraint)

    def reasoning_budget(self, tokens: int, prompt: ChatPrompt) -> ReasoningBudget | None:
        """Return a limit of the analysis channel."""
        analysis = self._codec.encode_rendered("analysis", most_tokens=16)
        start = (self._control["channel"], *analysis)
        _, _, turn = prompt.text.rpartition(_HARMONY_TURN)
        is_open = turn.startswith("<|channel|>analysis")
        return ReasoningBudget(tokens, start, self._control["end"], is_open)


class MarkerFormat:
    """Outputs with markers of reasoning and tool calls in the text."""

    def __init__(
        self,
        codec: TextCodec,
        *,
        markers: ReasoningMarkers | None,
        call_format: ToolCallFormat | None,
        eos: Sequence[int],
    ) -> None:
        self._codec = codec
        self.markers, self._call_format = markers, call_format
        self.supports_tools = call_format is not None
        self.call_id = None if call_format is None else call_format.call_id
        names = () if call_format is None else call_format.stop_tokens
        stops = [codec.token_id(name) for name in names]
        self.stop_token_ids = tuple(token_id for token_id in stops if token_id is not None)
        self._eos = (*eos, *self.stop_token_ids)
        self.limits_reasoning = None not in self._marker_ids()

    def parser(
        self,
        stop: Stop,
        tools: Tools = (),
        prompt: ChatPrompt = _NO_PROMPT,
        *,
        skip_special_tokens: bool = True,
    ) -> OutputParser:
        """See :class:`OutputFormat`."""
        return MarkerParser(
            self._codec.decode_all,
            stop,
            reasoning=self._reasoning(prompt),
            calls=self._call_format.continue_ids(prompt.num_past_calls)
            if self._call_format is not None and tools
            else None,
            tools=tools,
            dropped=self._eos if skip_special_tokens else (),
        ).between(self.markers or THINK)

    def guide(self, constraint: OutputConstraint, prompt: ChatPrompt = _NO_PROMPT) -> Guide:
        """Return a grammar of the reasoning, if any, followed by the answer or calls."""
        token_id, reasoning = self._codec.token_id, self._reasoning(prompt)
        return marker_guide(
            token_id,
            constraint,
            reasoning=reasoning,
            markers=self.markers or THINK,
            call_format=self._call_format,
        )

    def reasoning_budget(self, tokens: int, prompt: ChatPrompt) -> ReasoningBudget | None:
        """Return a limit of the text between the markers of reasoning."""
        start, end = self._marker_ids()
        state = self._reasoning(prompt)
        if start is None or end is None or state is None:
            return None
        return ReasoningBudget(tokens, (start,), end, state is ReasoningState.OPEN)

    def _marker_ids(self) -> tuple[int | None, int | None]:
        """Return the tokens of the markers of reasoning, None for what is not one token."""
        if self.markers is None:
            return None, None
        token_id = self._codec.token_id
        return token_id(self.markers.begin_token), token_id(self.markers.end)

    def _reasoning(self, prompt: ChatPrompt) -> ReasoningState | None:
        return None if self.markers is None else reasoning_state(prompt, self.markers)


def output_format(
    codec: TextCodec, eos_token_ids: Sequence[int], *, reasoning: str, tool_calls: str
) -> OutputFormat:
    """Return the format for the names of two parsers. RequestError if a name is unknown."""
    reasoning = REASONING_ALIASES.get(reasoning, reasoning)
    tool_calls = TOOL_CALL_ALIASES.get(tool_calls, tool_calls)
    for option, name, names in (
        ("--reasoning-parser", reasoning, REASONING_PARSERS),
        ("--tool-call-parser", tool_calls, TOOL_CALL_PARSERS),
    ):
        if name not in names:
            raise RequestError(f"{option} is {name!r}, must be one of {', '.join(names)}")
    template = codec.template_source or ""
    if reasoning == "auto":
        harmony = "<|channel|>" in template
        reasoning = "harmony" if harmony else detect_reasoning(template)
    if tool_calls == "auto":
        tool_calls = "harmony" if reasoning == "harmony" else detect_tool_call_format(template)
    if "harmony" in (reasoning, tool_calls):
        if {reasoning, tool_calls} - {"harmony", "none"}:
            raise RequestError(
                f"--reasoning-parser {reasoning} and --tool-call-parser {tool_calls} cannot "
                "be combined: harmony parses both"
            )
        return HarmonyFormat(codec)
    if tool_calls in CALL_STYLES:
        if reasoning != "none":
            raise RequestError(
                f"--reasoning-parser {reasoning} and --tool-call-parser {tool_calls} cannot be "
                "combined: calls in this format are a complete output without reasoning"
            )
        return CallOutputFormat(codec, CALL_STYLES[tool_calls], eos=eos_token_ids)
    markers, call_format = REASONING_MARKERS.get(reasoning), TOOL_CALL_FORMATS.get(tool_calls)
    if markers is None and call_format is None:
        return TextFormat(codec)
    return MarkerFormat(codec, markers=markers, call_format=call_format, eos=eos_token_ids)
