"""The OpenAPI description is complete and valid, and the server conforms to it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from serve.http.app import HttpApp
from serve.http.edge.settings import HttpSettings
from tests.fuzz.described import KEY, described_server, send_examples
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.running_server import ServerThread


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with described_server() as server:
        yield server


@pytest.fixture(scope="module")
def document(server: ServerThread) -> Any:
    request = urllib.request.Request(f"{server.url}/openapi.json", headers={"x-api-key": KEY})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def test_every_route_is_described(document: Any) -> None:
    app = HttpApp(FakeEngine(), HttpSettings())  # type: ignore[arg-type]
    for route in app.routes:
        for method in route.handlers:
            assert method in route.describe, f"{method} {route.path} has no Operation"
            assert document["paths"][route.path][method.lower()]["summary"]


def test_every_operation_is_complete(document: Any) -> None:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method == "parameters":
                continue
            for status, answer in operation["responses"].items():
                assert answer["description"] and answer["headers"]["x-request-id"]["required"]
                for kind, content in answer.get("content", {}).items():
                    jsonschema.Draft202012Validator.check_schema(content["schema"])
                    assert status == "200" or kind == "application/json", (path, status)
            assert {"200", "400", "431", "500", "503"} <= set(operation["responses"])
            if operation["security"]:
                assert "401" in operation["responses"]
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                jsonschema.Draft202012Validator.check_schema(schema)
                assert {"408", "413", "415", "417"} <= set(operation["responses"])


def test_the_description_has_the_name_of_the_model(document: Any) -> None:
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
    properties = chat["application/json"]["schema"]["properties"]
    assert properties["model"] == {"type": "string", "enum": ["m"]}
    temperature = {"type": ["number", "null"], "minimum": 0, "maximum": 2}
    assert properties["temperature"] == temperature


@pytest.mark.exhaustive
def test_the_server_conforms(server: ServerThread) -> None:
    """Generated requests get no 5xx and only described answers, and invalid ones are refused."""
    assert send_examples(server.url, valid=4, invalid=1) > 60
