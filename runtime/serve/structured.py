"""Fields that constrain an output: those of OpenAI's and of vLLM's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbuild.runtime.errors import RequestError
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.serve.errors import invalid_value, unsupported
from specbuild.runtime.serve.parsers.arguments import Tools
from specbuild.runtime.serve.parsers.output_constraint import OutputConstraint
from specbuild.runtime.serve.request_fields import IGNORED, REFUSED, JsonList, RequestFields

# Keys of structured_outputs that are not constraints, and are refused or ignored by the tables.
_OUTPUT_OPTIONS = {
    field.name.partition(".")[2]
    for field in (*IGNORED, *REFUSED)
    if field.name.startswith("structured_outputs.")
}


class StructuredFields(RequestFields):
    """Fields that constrain the output. A request may set one of them.

    The kinds of the last four fields are the keys of ``structured_outputs``.
    """

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: JsonList[str] | None = None
    guided_grammar: str | None = None

    def guide(self) -> Guide | None:
        """Return the guide of the output, or None. ApiError if two fields constrain it."""
        fields = [
            (f"guided_{kind}", kind, getattr(self, f"guided_{kind}"))
            for kind in ("json", "regex", "choice", "grammar")
        ]
        outputs = self.structured_outputs or {}
        fields += [
            (f"structured_outputs.{kind}", kind, value)
            for kind, value in outputs.items()
            if kind not in _OUTPUT_OPTIONS
        ]
        guides = [field_guide(*field) for field in fields if field[2] is not None]
        format_guide = response_guide(self.response_format, "response_format")
        guides += [] if format_guide is None else [format_guide]
        if len(guides) > 1:
            first, second = guides[0].name, guides[1].name
            raise invalid_value(
                second, f"{first} and {second} both constrain the output; leave one out"
            )
        return guides[0] if guides else None


def field_guide(name: str, kind: str, value: Any) -> Guide:
    """Return the guide of one of vLLM's fields. ApiError if its value is invalid."""
    try:
        return Guide.of({kind: value}, name=name)
    except RequestError as error:
        raise invalid_value(name, str(error)) from error


def response_guide(response_format: Mapping[str, Any] | None, name: str) -> Guide | None:
    """Return the guide of ``response_format``, or of ``text.format``, or None.

    Unless the schema is ``strict``, keywords that cannot be enforced are ignored. ApiError if the
    format is invalid.
    """
    type_ = "text" if response_format is None else response_format.get("type", "text")
    if response_format is None or type_ == "text":
        return None
    if type_ == "json_object":
        return Guide.json(name=name)
    if type_ != "json_schema":
        raise unsupported(f"{name}.type", "use text, json_object or json_schema")
    schema_object = response_format.get("json_schema", response_format)
    path = f"{name}.json_schema" if "json_schema" in response_format else name
    if not isinstance(schema_object, Mapping) or "schema" not in schema_object:
        raise invalid_value(path, f"{path} has no schema")
    return _json_guide(
        schema_object["schema"], f"{path}.schema", strict=schema_object.get("strict")
    )


def output_constraint(
    content: Guide | None,
    tools: Tools | None,
    choice: str | Mapping[str, Any] | None,
    *,
    parallel: bool | None,
) -> OutputConstraint | None:
    """Return the constraint of an output; None if the model may write anything.

    ``tools`` are those that may be called. ApiError if the tool choice is invalid.
    """
    requires_call = choice not in (None, "auto", "none")
    if not requires_call and content is None:
        return None
    callable_tools = list(tools or ())
    if requires_call and not callable_tools:
        raise invalid_value("tool_choice", "tool_choice requires a call, but tools is empty")
    if requires_call and choice != "required":
        name = _chosen_function(choice)
        callable_tools = [tool for tool in callable_tools if tool["function"]["name"] == name]
        if not callable_tools:
            raise invalid_value("tool_choice", f"tool_choice is {name!r}, which is not in tools")
    return OutputConstraint(
        content=content,
        calls=[
            _call_guide(tool["function"], f"tools.{i}") for i, tool in enumerate(callable_tools)
        ],
        requires_call=requires_call,
        allows_several=choice in (None, "auto", "required") and parallel is not False,
        name="tool_choice" if content is None or requires_call else content.name,
    )


def _chosen_function(choice: Any) -> Any:
    """Return the function of a tool choice, in the form of chats or of responses."""
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        name = choice.get("function", choice)
        if isinstance(name, Mapping) and isinstance(name.get("name"), str):
            return name["name"]
    raise invalid_value(
        "tool_choice", "tool_choice must be auto, none, required, or the name of a function"
    )


def _call_guide(function: Mapping[str, Any], path: str) -> tuple[str, Guide]:
    schema, name = function.get("parameters"), f"{path}.parameters"
    if schema is None:
        return function["name"], Guide.json(name=name)
    return function["name"], _json_guide(schema, name, strict=function.get("strict"))


def _json_guide(schema: Any, name: str, *, strict: object) -> Guide:
    try:
        return Guide.json(schema, lenient=strict is not True, name=name)
    except RequestError as error:
        raise invalid_value(name, str(error)) from error
