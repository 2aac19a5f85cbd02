"""The OpenAPI 3.1 document of the API, derived from the table of routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

if TYPE_CHECKING:
    from specbuild.runtime.serve.routes import Operation

_REF = "#/components/schemas/{model}"
_JSON = "application/json"
Schema = dict[str, Any]


def object_schema(description: str = "", /, **properties: str) -> Schema:
    """Return the schema of an object with these required properties, by their types.

    A type that ends with ``?`` may also be null.
    """
    schemas = {name: _schema(type_) for name, type_ in properties.items()}
    schema: Schema = {"type": "object", "properties": schemas, "required": list(schemas)}
    return schema | ({"description": description} if description else {})


def _schema(type_: str) -> Schema:
    return {"type": [type_[:-1], "null"]} if type_.endswith("?") else {"type": type_}


_EVENT = object_schema("Each event; data is JSON, or [DONE] at the end.", data="string")
_LINK = {"parameters": {"name": "$response.body#/id"}}


class _WithoutTitles(GenerateJsonSchema):
    """Schemas without titles, which would repeat the names of fields."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


def openapi_document(operations: Sequence[Operation]) -> Schema:
    """Return the document of all operations with a summary. It does not depend on the engine."""
    documented = [operation for operation in operations if operation.summary]
    bodies = [operation.body for operation in documented if operation.body is not None]
    _, defined = models_json_schema(
        [(body, "validation") for body in bodies],
        ref_template=_REF,
        schema_generator=_WithoutTitles,
    )
    error = object_schema(message="string", type="string", param="string?", code="string?")
    # Errors of Anthropic's routes have neither a parameter nor a code.
    error["required"] = ["message", "type"]
    schemas = {
        **_readable(defined["$defs"]),
        "Error": {"type": "object", "properties": {"error": error}, "required": ["error"]},
    }
    paths: dict[str, Schema] = {}
    for operation in documented:
        path = operation.path.replace(":path", "")
        paths.setdefault(path, {})[operation.method] = _description(operation, path)
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
    """Return a schema with Markdown's code marks in its descriptions, which are docstrings."""
    if isinstance(schema, Mapping):
        return {name: _readable(value) for name, value in schema.items()}
    if isinstance(schema, list):
        return [_readable(value) for value in schema]
    return schema.replace("``", "`") if isinstance(schema, str) else schema


def _description(operation: Operation, path: str) -> Schema:
    """Return the OpenAPI object of an operation."""
    success: Schema = {"description": "Done"}
    if operation.answer is not None:
        success["content"] = {operation.media_type: {"schema": operation.answer}}
        if operation.streams:
            success["content"]["text/event-stream"] = {"schema": _EVENT}
    if operation.links:
        success["links"] = {name: _LINK | {"operationId": name} for name in operation.links}
    error = {"$ref": _REF.format(model="Error")}
    description: Schema = {
        "operationId": operation.name,
        "summary": operation.summary,
        # A server without keys accepts requests without one.
        "security": [{}] if operation.is_open else [{}, {"key": []}],
        "responses": {
            "200": success,
            "default": {"description": "Refused", "content": {_JSON: {"schema": error}}},
        },
    }
    if "{" in path:
        name = path.partition("{")[2].partition("}")[0]
        description["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if operation.body is not None:
        schema = {"$ref": _REF.format(model=operation.body.__name__)}
        description["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    return description
