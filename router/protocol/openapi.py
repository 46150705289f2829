"""The OpenAPI document of the API, from the table of operations and the models' own schemas; nothing is written twice.

Knows nothing about HTTP or handlers.
"""

from typing import Any

from pydantic.json_schema import models_json_schema

from router.protocol.base import AnswerModel, ErrorResponse, RequestModel
from router.protocol.operations import OPERATIONS, Operation
from router.protocol.tokens import REQUEST_ID_CHARS_MAX

Json = dict[str, Any]

_REFERENCE = "#/components/schemas/{model}"
_DESCRIPTIONS = {
    200: "Success.",
    400: "The request is wrong; `param` names the field, if there is one.",
    404: "The model does not exist here.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not plain JSON.",
    499: "Ended by POST /abort_requests.",
    500: "An error of this server.",
    503: "Not now: try again after the given time.",
    504: "The request took too long.",
}


def build_document(version: str) -> Json:
    """The document, ready for JSON; `version`: the server's."""
    paths: Json = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdcluster", "version": version, "summary": "OpenAI-compatible API of one cluster."},
        "paths": paths,
        "components": {"schemas": _schemas()},
    }


def _operation(operation: Operation) -> Json:
    document: Json = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": _parameters(operation),
        "responses": {"200": _success(operation)},
    }
    if operation.body is not None:
        content = {"application/json": {"schema": _reference(operation.body)}}
        document["requestBody"] = {"required": True, "content": content}
    for status in operation.errors:
        document["responses"][str(status)] = _failure(status, ErrorResponse)
    if operation.not_ready is not None:
        document["responses"]["503"] = _failure(503, operation.not_ready)
    return document


def _parameters(operation: Operation) -> list[Json]:
    parameters: list[Json] = []
    if "{model}" in operation.path:
        schema: Json = {"type": "string", "minLength": 1}
        parameters.append({"name": "model", "in": "path", "required": True, "schema": schema})
    if operation.body is not None:
        schema = {"type": "string", "pattern": r"^[\x21-\x7e]+$", "minLength": 1, "maxLength": REQUEST_ID_CHARS_MAX}
        text = "Echoed in the answer, and what POST /abort_requests takes; a new one if not given."
        parameters.append({"name": "X-Request-Id", "in": "header", "schema": schema, "description": text})
    if operation.chunk is not None:
        schema = {"type": "string"}
        text = "`true`: the answer has `pdcluster_timing`; anything else: it does not."
        parameters.append({"name": "X-Pdcluster-Timing", "in": "header", "schema": schema, "description": text})
    return parameters


def _success(operation: Operation) -> Json:
    answer = operation.answer
    content: Json = {}
    if isinstance(answer, str):
        content[answer] = {"schema": {"type": "object" if answer == "application/json" else "string"}}
    else:
        content["application/json"] = {"schema": _reference(answer)}
    if operation.chunk is not None:
        content["text/event-stream"] = {"schema": _event(operation.chunk)}
    return {"description": _DESCRIPTIONS[200], "headers": _headers(), "content": content}


def _event(chunk: type[AnswerModel]) -> Json:
    """One server-sent event of a streamed answer."""
    part = {
        "type": "string",
        "description": "A part of the answer, or an error, after which only the end follows.",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_reference(chunk), _reference(ErrorResponse)]},
    }
    data = {"anyOf": [{"const": "[DONE]", "description": "The end of the stream."}, part]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _failure(status: int, model: type[AnswerModel]) -> Json:
    content = {"application/json": {"schema": _reference(model)}}
    return {"description": _DESCRIPTIONS[status], "headers": _headers(status == 503), "content": content}


def _headers(has_retry_after: bool = False) -> Json:
    headers: Json = {"X-Request-Id": {"required": True, "schema": {"type": "string"}}}
    if has_retry_after:
        headers["Retry-After"] = {
            "required": True,
            "schema": {"type": "integer", "minimum": 1},
            "description": "Seconds.",
        }
    return headers


def _reference(model: type[AnswerModel] | type[RequestModel]) -> Json:
    return {"$ref": _REFERENCE.format(model=model.__name__)}


def _schemas() -> Json:
    bodies = {operation.body for operation in OPERATIONS if operation.body is not None}
    answers = {
        answer for operation in OPERATIONS for answer in (operation.answer, operation.chunk, operation.not_ready)
    }
    models = {model for model in answers if isinstance(model, type)} | bodies | {ErrorResponse}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, document = models_json_schema([(model, "validation") for model in ordered], ref_template=_REFERENCE)
    schemas: Json = document["$defs"]
    for body in bodies:
        _describe_tolerance(schemas[body.__name__], body)
    return schemas


def _describe_tolerance(schema: Json, body: type[RequestModel]) -> None:
    """What a body may say besides its fields: null for those it could leave out, and values that change nothing."""
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        if name not in required and {"type": "null"} not in field.get("anyOf", []):
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}
    for name, values in body.unsupported.items():
        text = "Not supported: these values change nothing, all others are refused."
        schema["properties"][name] = {"enum": [None, *values], "description": text}
