"""A chat template: foreign code, compiled at its first use and run within bounds."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from threading import Lock
from typing import Any

from specbuild.runtime.errors import EngineFileError, RequestError
from specbuild.runtime.text.call_history import CallHistory
from specbuild.runtime.text.template_meter import (
    MAX_SOURCE_BYTES,
    Meter,
    TemplateOverBoundsError,
    check_count,
)
from specbuild.runtime.text.template_operations import (
    FILTERS,
    GLOBALS,
    OPERATORS,
    binary,
    bounded_filter,
    bounded_test,
    check_call,
)

_WAY_OUT = "use --raw, or give token ids"
_MAX_REASON = 300


class ChatTemplate:
    """A template of an engine or checkpoint: nothing of it is read before it is needed."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._compiled: Any = None
        self._meter = Meter()
        self._lock = Lock()
        self._history: CallHistory | None = None

    def compile(self) -> None:
        """Raises EngineFileError where the source is too long or no template."""
        with self._lock:
            self._template()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The chat with the assistant's turn opened; ``variables`` are what else it knows.

        Without ``add_generation_prompt`` the template is requested not to open a turn.
        Raises EngineFileError where the template does not compile, RequestError where it refuses
        the messages, with its own words, or takes more than any chat needs.
        """
        with self._lock:
            template = self._template()
            self._meter.start()
            try:
                text: str = template.render(
                    {
                        "documents": None,
                        **variables,
                        "messages": messages,
                        "tools": tools,
                        "add_generation_prompt": add_generation_prompt,
                    }
                )
            except TemplateOverBoundsError as error:
                raise RequestError(
                    f"the chat template goes too far: {error}; {_WAY_OUT}"
                ) from error
            except Exception as error:  # foreign code, in a sandbox: it may raise what it likes
                reason = _reason(error)
                raise RequestError(f"the chat template refuses the prompt: {reason}") from error
            return text

    def fitted(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> Sequence[Mapping[str, Any]]:
        """Return the messages in the form that this template shows with all their calls.

        The form is found at the first assistant's message. RequestError where there is none.
        """
        if all(message.get("role") != "assistant" for message in messages):
            return messages
        if self._history is None:
            self._history = CallHistory.of(lambda probe: self.render(probe, variables))
        return self._history.fitted(messages)

    def render_open(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The chat up to the end of the last message's content, so that the model continues it.

        A mark behind the content shows where that is in the rendered text. White space at the end
        of the content is kept unless the template strips it. RequestError as for :meth:`render`,
        and where the last message has no text or the template does not write it.
        """
        content = messages[-1].get("content") if messages else None
        if not isinstance(content, str) or not content:
            raise RequestError(
                "continue_final_message: the last message has no text to continue",
                field="continue_final_message",
            )
        mark = f"<{secrets.token_hex(16)}>"
        # A template that strips the content strips the space behind the mark too.
        last = {**messages[-1], "content": f"{content}{mark} "}
        text = self.render(
            [*messages[:-1], last], variables, tools=tools, add_generation_prompt=False
        )
        before, found, after = text.rpartition(mark)
        if not found:
            raise RequestError(
                "continue_final_message: the chat template does not write the last message's text",
                field="continue_final_message",
            )
        return before if after.startswith(" ") else before.rstrip()

    def _template(self) -> Any:
        if self._compiled is None:
            size = len(self.source.encode(errors="replace"))
            if size > MAX_SOURCE_BYTES:
                raise EngineFileError(
                    f"the chat template has {size} bytes, at most {MAX_SOURCE_BYTES} are read; "
                    f"{_WAY_OUT}"
                )
            try:
                self._compiled = _environment(self._meter).from_string(self.source)
            except Exception as error:  # its syntax, or a depth that Python does not take
                raise EngineFileError(
                    f"the chat template does not compile: {_reason(error)}; {_WAY_OUT}"
                ) from error
        return self._compiled


def _reason(error: Exception) -> str:
    """An exception's words, at a length that a sentence bears."""
    words = str(error) or type(error).__name__
    return words if len(words) <= _MAX_REASON else f"{words[:_MAX_REASON]}..."


def _environment(meter: Meter) -> Any:
    """The sandbox in which every operation is counted, as Hugging Face's templates expect it."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Bounded(ImmutableSandboxedEnvironment):
        """Calls, operators, and what :func:`_generator` adds, are counted before they are done."""

        intercepted_binops = OPERATORS
        code_generator_class = _generator()
        step, nested = staticmethod(meter.step), staticmethod(meter.nested)
        weighed = staticmethod(meter.weighed)

        def call(self, context: Any, called: Any, /, *given: Any, **named: Any) -> Any:
            given = check_call(meter, called, given, named)
            result = super().call(context, called, *given, **named)
            return meter.nested(result) if called is dict else meter.made(result)

        def call_binop(self, _context: Any, operator: str, left: Any, right: Any) -> Any:
            return binary(meter, operator, left, right)

        def concat(self, pieces: Iterable[str]) -> str:
            kept = []
            for piece in pieces:
                meter.step()
                meter.text(len(piece))
                kept.append(piece)
            return "".join(kept)

        def joined(self, values: Sequence[Any]) -> str:
            meter.text(sum(map(meter.text_size, values)))
            return "".join(map(str, values))

        def cut(self, value: Any, *ends: Any) -> Any:
            return meter.made(value[slice(*ends)])

        def _parse(self, *source: Any) -> nodes.Template:
            tree = super()._parse(*source)
            if tree.find(nodes.EvalContextModifier) or tree.find(nodes.ScopedEvalContextModifier):
                raise TemplateError("it switches escaping on or off, which no chat needs")
            return tree

    environment = Bounded(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        finalize=_shown(meter),
        extensions=[loopcontrols, _generation()],
    )
    _offer(environment, meter)
    return environment


def _generation() -> Any:
    """The tag that marks what training learns from."""
    from jinja2.ext import Extension

    class Generation(Extension):
        """``{% generation %}`` marks what training learns from: here it is transparent."""

        tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 reads

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _offer(environment: Any, meter: Meter) -> None:
    """Filters and functions that templates may use."""
    from jinja2 import TemplateError

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    # A date that changed at midnight would change every prompt, and what is known of its beginning.
    compiled_at = datetime.now()

    def strftime_now(spec: str) -> str:
        check_count(len(spec))
        return compiled_at.strftime(spec)

    filters = environment.filters | {"tojson": tojson}
    environment.filters = {n: bounded_filter(meter, n, filters[n]) for n in sorted(FILTERS)}
    environment.tests = {n: bounded_test(meter, test) for n, test in environment.tests.items()}
    offered = {name: environment.globals[name] for name in sorted(GLOBALS)}
    environment.globals = offered | {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
    }


def _shown(meter: Meter) -> Any:
    """What ``{{ value }}`` does first; that it asks for the context keeps it out of compiling."""
    from jinja2 import pass_context

    @pass_context
    def shown(_context: Any, value: Any) -> Any:
        if not isinstance(value, str):
            meter.text(meter.text_size(value))
        return value

    return shown


def _generator() -> Any:
    """The compiler of templates: it counts blocks, texts joined by ``~``, slices and lists."""
    from jinja2.compiler import CodeGenerator, operators

    class Counting(CodeGenerator):
        def blockvisit(self, nodes: Any, frame: Any) -> None:
            self.writeline("environment.step()")
            super().blockvisit(nodes, frame)

        def visit_Concat(self, node: Any, frame: Any) -> None:  # noqa: N802 - jinja2's names
            self._call("joined((", node.nodes, frame, "))")

        def visit_Compare(self, node: Any, frame: Any) -> None:  # noqa: N802
            self.write("(")
            self._counted(self.visit, node.expr, frame, "weighed")
            for operand in node.ops:
                self.write(f" {operators[operand.op]} ")
                self._counted(self.visit, operand.expr, frame, "weighed")
            self.write(")")

        def visit_Getitem(self, node: Any, frame: Any) -> None:  # noqa: N802
            part = node.arg
            if not hasattr(part, "step"):
                super().visit_Getitem(node, frame)
                return
            self._call("cut(", (node.node, part.start, part.stop, part.step), frame, ")")

        def visit_List(self, node: Any, frame: Any) -> None:  # noqa: N802
            self._counted(super().visit_List, node, frame)

        def visit_Dict(self, node: Any, frame: Any) -> None:  # noqa: N802
            self._counted(super().visit_Dict, node, frame)

        def visit_Tuple(self, node: Any, frame: Any) -> None:  # noqa: N802
            if node.ctx == "load":
                self._counted(super().visit_Tuple, node, frame)
            else:
                super().visit_Tuple(node, frame)

        def _counted(self, visit: Any, node: Any, frame: Any, how: str = "nested") -> None:
            self.write(f"environment.{how}(")
            visit(node, frame)
            self.write(")")

        def _call(self, start: str, parts: Iterable[Any], frame: Any, end: str) -> None:
            self.write(f"environment.{start}")
            for part in parts:
                if part is None:
                    self.write("None")
                else:
                    self.visit(part, frame)
                self.write(", ")
            self.write(end)

    return Counting
