"""The OpenAPI document: whole, and of one mind with the models that check requests."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from core import errors
from core.errors import PdclusterError
from router.protocol.generate import CHILDREN_MAX, STOP_STRINGS_MAX
from router.protocol.openapi import build_document
from router.protocol.operations import OPERATIONS

DOCUMENT = build_document("1.2.3")


def nodes(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from nodes(child)


def test_every_reference_leads_somewhere_and_no_schema_is_unused() -> None:
    used = {node["$ref"] for node in nodes(DOCUMENT) if isinstance(node, dict) and "$ref" in node}
    assert used == {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}
    assert json.loads(json.dumps(DOCUMENT)) == DOCUMENT


def test_every_operation_has_its_statuses_with_the_envelope() -> None:
    for operation in OPERATIONS:
        responses = DOCUMENT["paths"][operation.path][operation.method.lower()]["responses"]
        ready = {503} if operation.not_ready else set()
        assert {int(status) for status in responses} == {200, *operation.errors, *ready}
        for status in operation.errors:
            schema = responses[str(status)]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/ErrorResponse"}
        if "503" in responses:
            assert responses["503"]["headers"]["Retry-After"]["required"]


def test_statuses_of_all_errors_that_a_request_may_end_with_are_documented() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PdclusterError)]
    documented = {status for operation in OPERATIONS for status in operation.errors}
    assert {kind.http_status for kind in kinds} <= documented


@pytest.mark.parametrize(
    ("schema", "field", "expected"),
    [
        ("CompletionRequest", "n", {"minimum": 1, "maximum": CHILDREN_MAX}),
        ("CompletionRequest", "temperature", {"minimum": 0, "maximum": 2}),
        ("CompletionRequest", "echo", {"enum": [None, False]}),
        ("CompletionRequest", "logprobs", {"minimum": 0, "maximum": 20}),
        ("ChatCompletionRequest", "messages", {"minItems": 1, "maxItems": 4096}),
        ("ChatCompletionRequest", "tools", {"enum": [None, []]}),
        ("CompletionRequest", "stop", {"maxItems": STOP_STRINGS_MAX}),
    ],
)
def test_limits_of_a_field_are_in_its_schema(schema: str, field: str, expected: dict[str, Any]) -> None:
    properties = DOCUMENT["components"]["schemas"][schema]["properties"]
    found = [node for node in nodes(properties[field]) if isinstance(node, dict)]
    assert any(expected.items() <= node.items() for node in found), properties[field]


def test_optional_fields_may_be_null_and_unknown_ones_not_be_there() -> None:
    schema = DOCUMENT["components"]["schemas"]["CompletionRequest"]
    assert schema["additionalProperties"] is False and schema["required"] == ["prompt"]
    for name, field in schema["properties"].items():
        is_nullable = {"type": "null"} in field.get("anyOf", []) or None in field.get("enum", [])
        assert is_nullable == (name != "prompt"), name
