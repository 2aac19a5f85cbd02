"""The form that a client asks of an answer: the fields of OpenAI's API and of vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbuild.runtime.errors import RequestError
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.serve.errors import not_offered, refused
from specbuild.runtime.serve.parsers.arguments import Tools
from specbuild.runtime.serve.parsers.asked_form import AskedForm
from specbuild.runtime.serve.request_fields import IGNORED, REFUSED, Listed, RequestFields

# Keys of structured_outputs beside the form. The table of fields refuses all but neutral values.
_OUTPUT_OPTIONS = {
    field.name.partition(".")[2]
    for field in (*IGNORED, *REFUSED)
    if field.name.startswith("structured_outputs.")
}


class StructuredFields(RequestFields):
    """Fields of which one may ask for a form; ``structured_outputs`` has the last four as keys."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Listed[str] | None = None
    guided_grammar: str | None = None

    def guide(self) -> Guide | None:
        """The guide of the answer; None where none is asked for. ApiError where two are."""
        given = [
            (f"guided_{kind}", kind, getattr(self, f"guided_{kind}"))
            for kind in ("json", "regex", "choice", "grammar")
        ]
        outputs = self.structured_outputs or {}
        given += [
            (f"structured_outputs.{kind}", kind, value)
            for kind, value in outputs.items()
            if kind not in _OUTPUT_OPTIONS
        ]
        found = [guide_of(*each) for each in given if each[2] is not None]
        form = response_guide(self.response_format, "response_format")
        found += [] if form is None else [form]
        if len(found) > 1:
            first, second = found[0].name, found[1].name
            raise refused(second, f"{first} and {second} both ask for a form; leave one out")
        return found[0] if found else None


def guide_of(name: str, kind: str, value: Any) -> Guide:
    """The guide of one of vLLM's fields. ApiError where it is no form."""
    try:
        return Guide.of({kind: value}, name=name)
    except RequestError as error:
        raise refused(name, str(error)) from error


def response_guide(given: Mapping[str, Any] | None, name: str) -> Guide | None:
    """The guide of ``response_format``, or of ``text.format``: its schema is beside its type.

    ApiError where it is none. Where it is not ``strict``, keywords that cannot be enforced are left
    out.
    """
    kind = "text" if given is None else given.get("type", "text")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return Guide.json(name=name)
    if kind != "json_schema":
        raise not_offered(f"{name}.type", "it is text, json_object or json_schema")
    described = given.get("json_schema", given)
    where = f"{name}.json_schema" if "json_schema" in given else name
    if not isinstance(described, Mapping) or "schema" not in described:
        raise refused(where, f"{where} has no schema")
    return _json(described["schema"], f"{where}.schema", strict=described.get("strict"))


def asked_form(
    content: Guide | None,
    tools: Tools | None,
    choice: str | Mapping[str, Any] | None,
    *,
    parallel: bool | None,
) -> AskedForm | None:
    """What an output has to be; None where it is free. ``tools`` are those that may be called.

    ApiError where the choice is none, or names no tool.
    """
    must = choice not in (None, "auto", "none")
    if not must and content is None:
        return None
    offered = list(tools or ())
    if must and not offered:
        raise refused("tool_choice", "tool_choice asks for a call, but there are no tools")
    if must and choice != "required":
        name = _named(choice)
        offered = [tool for tool in offered if tool["function"]["name"] == name]
        if not offered:
            raise refused("tool_choice", f"tool_choice names {name!r}, which is none of the tools")
    return AskedForm(
        content=content,
        calls=[_call(tool["function"], f"tools.{i}") for i, tool in enumerate(offered)],
        must_call=must,
        several=choice in (None, "auto", "required") and parallel is not False,
        name="tool_choice" if content is None or must else content.name,
    )


def _named(choice: Any) -> Any:
    """The function that a choice names, in the form of chats or of responses."""
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        name = choice.get("function", choice)
        if isinstance(name, Mapping) and isinstance(name.get("name"), str):
            return name["name"]
    raise refused(
        "tool_choice", "tool_choice must be auto, none, required, or the name of a function"
    )


def _call(function: Mapping[str, Any], where: str) -> tuple[str, Guide]:
    schema, name = function.get("parameters"), f"{where}.parameters"
    if schema is None:
        return function["name"], Guide.json(name=name)
    return function["name"], _json(schema, name, strict=function.get("strict"))


def _json(schema: Any, name: str, *, strict: object) -> Guide:
    try:
        return Guide.json(schema, lenient=strict is not True, name=name)
    except RequestError as error:
        raise refused(name, str(error)) from error
