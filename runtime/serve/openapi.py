"""The API as an OpenAPI 3.1 document: bodies are the fields that routes read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from specbuild.runtime.serve.chat import ChatFields
from specbuild.runtime.serve.completions import CompletionFields
from specbuild.runtime.serve.responses.fields import ResponseFields
from specbuild.runtime.serve.tokens import DetokenizeFields, TokenizeFields

_REF = "#/components/schemas/{model}"
_JSON = "application/json"
Schema = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Operation:
    """One method of one path. ``answer`` None is an empty one; ``streams``: it may be events."""

    path: str
    name: str
    summary: str
    method: str = "get"
    body: type[BaseModel] | None = None
    answer: Schema | None = None
    media_type: str = _JSON
    streams: bool = False
    open: bool = False


def _object(about: str = "", **properties: str) -> Schema:
    """An object that has all of these properties, by their types; "a?" may be null."""
    typed = {name: _typed(kind) for name, kind in properties.items()}
    made: Schema = {"type": "object", "properties": typed, "required": list(typed)}
    return made | ({"description": about} if about else {})


def _typed(kind: str) -> Schema:
    return {"type": [kind[:-1], "null"]} if kind.endswith("?") else {"type": kind}


_ANSWERED = {"id": "string", "object": "string", "created": "integer", "model": "string"}
_RESPONSE = _object(
    id="string", object="string", created_at="integer", status="string", model="string",
    output="array", error="object?", incomplete_details="object?", usage="object?",
)  # fmt: skip
_EVENT = _object("Each event; data is JSON, or [DONE] at the end.", data="string")
_MODEL = _object(id="string", object="string", created="integer", max_model_len="integer")
_OF_A_RESPONSE = ("retrieveResponse", "deleteResponse", "cancelResponse")
_LINK = {"parameters": {"name": "$response.body#/id"}}
_OPERATIONS = (
    _Operation(
        path="/v1/completions",
        method="post",
        name="createCompletion",
        summary="Continue prompts of text or token ids",
        body=CompletionFields,
        answer=_object(**_ANSWERED, choices="array", usage="object"),
        streams=True,
    ),
    _Operation(
        path="/v1/chat/completions",
        method="post",
        name="createChatCompletion",
        summary="Answer a chat",
        body=ChatFields,
        answer=_object(**_ANSWERED, choices="array", usage="object"),
        streams=True,
    ),
    _Operation(
        path="/v1/responses",
        method="post",
        name="createResponse",
        summary="Make a response",
        body=ResponseFields,
        answer=_RESPONSE,
        streams=True,
    ),
    _Operation(
        path="/v1/responses/{name}",
        name="retrieveResponse",
        summary="A response that is kept",
        answer=_RESPONSE,
    ),
    _Operation(
        path="/v1/responses/{name}",
        method="delete",
        name="deleteResponse",
        summary="Forget a response",
        answer=_object(id="string", object="string", deleted="boolean"),
    ),
    _Operation(
        path="/v1/responses/{name}/cancel",
        method="post",
        name="cancelResponse",
        summary="End a response that is made in the background",
        answer=_RESPONSE,
    ),
    _Operation(
        path="/v1/models",
        name="listModels",
        summary="The names of the model",
        answer=_object(object="string", data="array"),
    ),
    _Operation(
        path="/v1/models/{model}",
        name="retrieveModel",
        summary="One name of the model",
        answer=_MODEL,
    ),
    _Operation(
        path="/tokenize",
        method="post",
        name="tokenize",
        summary="The ids of a text or a chat",
        body=TokenizeFields,
        answer=_object(tokens="array", count="integer", max_model_len="integer"),
    ),
    _Operation(
        path="/detokenize",
        method="post",
        name="detokenize",
        summary="The text of ids",
        body=DetokenizeFields,
        answer=_object(prompt="string"),
    ),
    _Operation(path="/health", name="health", summary="Whether requests are served", open=True),
    _Operation(path="/ping", name="ping", summary="As /health", open=True),
    _Operation(path="/ping", method="post", name="postPing", summary="As /health", open=True),
    _Operation(
        path="/load",
        name="load",
        summary="What the engine has to do",
        answer=_object(
            server_load="integer", running="integer", waiting="integer", used_pages="number"
        ),
        open=True,
    ),
    _Operation(
        path="/version",
        name="version",
        summary="specbuild's version",
        answer=_object(version="string"),
        open=True,
    ),
    _Operation(
        path="/metrics",
        name="metrics",
        summary="Prometheus' text",
        answer={"type": "string"},
        media_type="text/plain",
        open=True,
    ),
)


class _WithoutTitles(GenerateJsonSchema):
    """Names of fields say what their titles would say again."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


def openapi_document() -> Schema:
    """The document, which is the same for every engine."""
    bodies = [op.body for op in _OPERATIONS if op.body is not None]
    _, defined = models_json_schema(
        [(body, "validation") for body in bodies],
        ref_template=_REF,
        schema_generator=_WithoutTitles,
    )
    error = _object(message="string", type="string", param="string?", code="string?")
    schemas = {
        **_readable(defined["$defs"]),
        "Error": {"type": "object", "properties": {"error": error}, "required": ["error"]},
    }
    paths: dict[str, Schema] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "specbuild serve",
            "version": version("specbuild"),
            "description": "OpenAI's API over an engine directory.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _readable(schema: Any) -> Any:
    """Descriptions are docstrings; Markdown's marks are single."""
    if isinstance(schema, Mapping):
        return {name: _readable(value) for name, value in schema.items()}
    if isinstance(schema, list):
        return [_readable(value) for value in schema]
    return schema.replace("``", "`") if isinstance(schema, str) else schema


def _described(operation: _Operation) -> Schema:
    content: Schema = {operation.media_type: {"schema": operation.answer}}
    if operation.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    done: Schema = {"description": "Done"}
    if operation.answer is not None:
        done["content"] = content
    if operation.name == "createResponse":
        done["links"] = {name: _LINK | {"operationId": name} for name in _OF_A_RESPONSE}
    refused = {"$ref": _REF.format(model="Error")}
    described: Schema = {
        "operationId": operation.name,
        "summary": operation.summary,
        # Without keys everybody is served.
        "security": [{}] if operation.open else [{}, {"key": []}],
        "responses": {
            "200": done,
            "default": {"description": "Refused", "content": {_JSON: {"schema": refused}}},
        },
    }
    if "{" in operation.path:
        name = operation.path.partition("{")[2].partition("}")[0]
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if operation.body is not None:
        schema = {"$ref": _REF.format(model=operation.body.__name__)}
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    return described
