"""Rows of the catalogue about prompts, tokens and texts, and access to files and the network."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from serve import Engine
from serve.http.calls.messages import MAX_MESSAGES
from serve.text.tokenizer import Tokenizer
from tests.support.engine.checkpoints import checkpoint, edit_json
from tests.support.engine.child import last_json, output_of
from tests.support.engine.tokenizer_files import make_directory
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.raw_requests import BODY, CHAT
from tests.support.http.running_server import Served, ServerThread, run_with_server

COMPLETIONS = "/v1/completions"
CONTEXT = 64
KINDS = ("bytes", "metaspace", "sentencepiece")


@pytest.fixture(scope="module")
def engine() -> Engine:
    path = str(checkpoint("llama"))
    return Engine(path, served_model_name="m", max_num_seqs=8, max_model_len=CONTEXT)


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with ServerThread(engine) as server:
        yield server.url
        assert engine.stats().pages_in_use == 0


def complete(url: str, prompt: Any, **fields: Any) -> requests.Response:
    body = {"model": "m", "prompt": prompt, "max_tokens": 1, **fields}
    return requests.post(url + COMPLETIONS, json=body, timeout=20)


def refused(answer: requests.Response) -> tuple[str, str]:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error["param"], error["code"]


# ---- files and the network


@pytest.mark.process
@pytest.mark.row("P2", "P5", "A5", "G3")
def test_no_file_or_connection_is_opened() -> None:
    """Audit hooks record the process while it answers requests that name files and addresses."""
    address = "http://169.254.169.254/latest"
    names = ["other", "../../etc/passwd", "/etc/passwd", "..%2f..%2fetc%2fpasswd", "file:///x", "."]
    models: list[tuple[str, Any]] = [(f"GET /v1/models/{name}", None) for name in names]
    for name in names:
        models += [(f"POST {CHAT}", {**BODY, "model": name})]
        models += [(f"POST {COMPLETIONS}", {"model": name, "prompt": "hi"})]
        models += [("POST /v1/embeddings", {"model": name, "input": "hi"})]
    image = {"type": "image_url", "image_url": {"url": address}}
    audio = {"type": "input_audio", "input_audio": {"data": address, "format": "wav"}}
    file = {"type": "file", "file": {"file_id": "file:///etc/passwd"}}
    turns = [{"role": "user", "content": [{"type": "input_image", "image_url": address}]}]
    media: list[tuple[str, Any]] = [("POST /v1/responses", {"model": "fake", "input": turns})]
    for part in (image, audio, file):
        media += [(f"POST {CHAT}", {**BODY, "messages": [{"role": "user", "content": [part]}]})]
    schemas: list[tuple[str, Any]] = []
    for reference in (address, "file:///etc/passwd"):
        schema = {"type": "object", "properties": {"a": {"$ref": reference}}}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        schemas += [(f"POST {CHAT}", {**BODY, "tools": [tool]})]

    root = Path(__file__).parents[4]
    script = root / "tests/support/http/audited_server.py"
    calls = json.dumps([*models, *media, *schemas])
    result = last_json(output_of(script, calls, PYTHONPATH=root))
    assert result["events"] == []
    answers = [(answer["status"], answer["code"]) for answer in result["answers"]]
    assert set(answers[: len(models)]) <= {(404, "model_not_found"), (404, "unknown_url")}
    assert answers[len(models) : -len(schemas)] == [(400, "unsupported_parameter")] * len(media)
    assert answers[-len(schemas) :] == [(400, "invalid_schema")] * len(schemas)


# ---- prompts


@pytest.mark.row("T1")
def test_an_empty_text_is_a_prompt_with_a_bos_token(url: str, tmp_path: Path) -> None:
    answer = complete(url, "")
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == 1
    path = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), path)
    edit_json(path / "tokenizer_config.json", lambda values: values.update(add_bos_token=False))
    edit_json(path / "tokenizer.json", lambda values: values.update(post_processor=None))
    engine = Engine(str(path), served_model_name="m", max_num_seqs=2, max_model_len=CONTEXT)
    with ServerThread(engine) as server:
        assert refused(complete(server.url, "")) == ("prompt", "invalid_prompt")
        assert complete(server.url, "a").status_code == 200


@pytest.mark.row("T2", "T4")
@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], "invalid_prompt"),
        ([[]], "invalid_prompt"),
        ([[1], []], "invalid_prompt"),
        (None, "missing_required_parameter"),
        (["a"] * 10_000, "array_above_max_length"),
        ([[1]] * 10_000, "array_above_max_length"),
    ],
)
def test_empty_and_too_long_lists(url: str, prompt: Any, code: str) -> None:
    assert refused(complete(url, prompt)) == ("prompt", code)


@pytest.mark.row("T2")
def test_a_list_of_an_empty_text(url: str) -> None:
    """[""] is one prompt of a BOS token, as "" is."""
    assert complete(url, [""]).json()["usage"]["prompt_tokens"] == 1


@pytest.mark.row("T3")
def test_token_ids(url: str, engine: Engine) -> None:
    width, size = engine.spec.vocab_size, engine.tokenizer.vocab_size
    assert size < width  # ids of padding rows of the embedding matrix are valid
    for token in (0, size - 1, size, width - 1):
        assert complete(url, [token]).status_code == 200
    for token in (-1, width, width + 64, 2**31 - 1, 2**31, 2**63 - 1, 2**63):
        for prompt in ([token], [5, token], [[5], [token]]):
            assert refused(complete(url, prompt)) == ("prompt", "invalid_value"), prompt
    for value in (1.5, 1.0, True, "a", None, [1], {}):
        for prompt in ([5, value], [[5, value]]):
            assert refused(complete(url, prompt)) == ("prompt", "invalid_type"), prompt
    for prompt in (["a", 5], ["a", [5]], [[5], "a"], [True], [None], [{}], [1.5], [[[5]]]):
        assert refused(complete(url, prompt)) == ("prompt", "invalid_type"), prompt


@pytest.mark.row("T5")
def test_prompts_around_the_context(url: str) -> None:
    assert complete(url, [5] * (CONTEXT - 1)).json()["usage"]["completion_tokens"] == 1
    assert complete(url, [5] * CONTEXT, max_tokens=0).status_code == 200
    code = "context_length_exceeded"
    assert refused(complete(url, [5] * CONTEXT)) == ("prompt", code)
    assert refused(complete(url, [5] * (CONTEXT - 1), max_tokens=2)) == ("max_tokens", code)
    for count in (CONTEXT + 1, 10 * CONTEXT, 100_000):
        assert refused(complete(url, [5] * count, max_tokens=0)) == ("prompt", code)


@pytest.mark.timing
@pytest.mark.row("T5")
def test_megabytes_of_text_are_refused_without_tokenizing(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is refused by its length alone, within two seconds."""
    monkeypatch.delattr("serve.text.tokenizer.Tokenizer.encode")
    text = "a b c d " * 900_000
    began_s = time.monotonic()
    assert refused(complete(url, text)) == ("prompt", "context_length_exceeded")
    assert time.monotonic() - began_s < 2


@pytest.mark.row("T13")
def test_unusual_characters_are_text(url: str) -> None:
    text = "\ufffe\uffff \u202e\u2066 \U000e0041\U000e007f \ue000\U0010ffff \u200d\ufeff e\u0301"
    for endpoint, body in (
        (COMPLETIONS, {"prompt": text[:20], "max_tokens": 1}),
        (CHAT, {"messages": [{"role": "user", "content": text[:10]}], "max_tokens": 1}),
        ("/tokenize", {"prompt": text}),
        ("/v1/embeddings", {"input": text[:15]}),
    ):
        answer = requests.post(url + endpoint, json={"model": "m", **body}, timeout=20)
        assert answer.status_code == 200, (endpoint, answer.text)
    tokens = requests.post(f"{url}/tokenize", json={"prompt": text}, timeout=20).json()["tokens"]
    detokenized = requests.post(f"{url}/detokenize", json={"tokens": tokens[1:]}, timeout=20).json()
    assert detokenized["prompt"] == text


@pytest.mark.row("T16")
def test_the_name_of_a_model_is_exact() -> None:
    async def check(served: Served) -> None:
        names = (
            "cafe\u0301-1",
            "c\u0430f\u00e9-1",
            "CAF\u00c9-1",
            "caf\u00e9-1 ",
            "\u2060caf\u00e9-1",
        )
        for name in names:
            status, answer = await served.post(CHAT, {**BODY, "model": name})
            assert status == 404
            error = answer["error"]
            assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert (await served.post(CHAT, {**BODY, "model": "caf\u00e9-1"}))[0] == 200

    run_with_server(FakeEngine(model_name="caf\u00e9-1"), check)


@pytest.mark.row("T17")
def test_conversations_of_very_many_turns(url: str) -> None:
    """Too many messages are refused; the allowed number is rendered and exceeds the context."""
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    body: dict[str, Any] = {"model": "m", "max_tokens": 1}
    for count, code in (
        (100_000, "array_above_max_length"),
        (MAX_MESSAGES, "context_length_exceeded"),
    ):
        body["messages"] = turns * (count // 2)
        answer = requests.post(url + CHAT, json=body, timeout=20)
        assert refused(answer)[1] == code


# ---- tokenizing

UNITS = ("a", " ", "\n", "\u0301", "👩\u200d👩\u200d👧", "日本語", "QUJDRA+/")


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Tokenizer:
    return Tokenizer.load(make_directory(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.mark.covering(1)
@pytest.mark.row("T12")
@pytest.mark.parametrize("unit", UNITS, ids=range(len(UNITS)))
def test_time_to_tokenize_is_linear(tokenizer: Tokenizer, unit: str) -> None:
    """Four times the text takes less than ten times as long; quadratic time would be sixteen."""

    def seconds(num_bytes: int) -> float:
        text = unit * (num_bytes // len(unit.encode()))
        times_s = []
        for _ in range(3):
            began_s = time.thread_time()
            tokenizer.encode(text)
            times_s.append(time.thread_time() - began_s)
        return min(times_s)

    seconds(1 << 10)
    short_s, long_s = seconds(1 << 16), seconds(1 << 18)
    assert long_s < 10 * short_s + 0.05, (short_s, long_s)
    assert long_s < 2.0


@pytest.mark.row("T12", "X7")
def test_a_text_at_which_the_tokenizer_panics(tmp_path: Path) -> None:
    """The tokenizers library panics, which raises no Exception; every endpoint goes on."""
    path = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), path)
    split = {"type": "Split", "pattern": {"Regex": "x(a+)+$"}, "behavior": "Isolated"}
    edit_json(
        path / "tokenizer.json",
        lambda values: values.update(pre_tokenizer=split | {"invert": False}),
    )
    text = "x" + "a" * 50 + "b"
    bodies: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"prompt": text, "max_tokens": 1},
        CHAT: {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
        "/v1/embeddings": {"input": text},
        "/tokenize": {"prompt": text},
    }
    engine = Engine(str(path), served_model_name="m", max_num_seqs=2, max_model_len=256)
    with ServerThread(engine) as server:
        for endpoint, body in bodies.items():
            answer = requests.post(server.url + endpoint, json={"model": "m", **body}, timeout=20)
            assert refused(answer)[1] == "invalid_prompt", endpoint
        assert complete(server.url, "fox").status_code == 200
        assert engine.stats().num_unfinished == 0


@pytest.mark.row("T6")
def test_no_special_token_comes_from_a_text(tokenizer: Tokenizer) -> None:
    """No tokenizer makes a special token from text, whatever surrounds it."""
    assert len(tokenizer.special_token_strings) >= 2
    for special in tokenizer.special_token_strings:
        for text in (special, f"a{special}b", special * 3, f" {special}\n{special} ", special[:-1]):
            ids = tokenizer.encode_plain(text)
            assert not tokenizer.special_ids.intersection(ids), text


# ---- streams


@pytest.mark.row("T14")
def test_characters_are_streamed_whole(url: str) -> None:
    """Each character is several tokens, and the answer is cut off at every one of them."""
    text = "日ï👍🏽"
    body = {"model": "m", "prompt": "a", "structured_outputs": {"choice": [text]}}
    endings = set()
    for count in range(1, 40):
        whole = requests.post(url + COMPLETIONS, json={**body, "max_tokens": count}, timeout=20)
        choice = whole.json()["choices"][0]
        data = requests.post(
            url + COMPLETIONS, json={**body, "max_tokens": count, "stream": True}, timeout=20
        ).content
        streamed = ""
        for event in data.split(b"\n\n")[:-2]:
            chunk = json.loads(event.decode("utf-8", "strict").removeprefix("data: "))
            streamed += chunk["choices"][0]["text"]
        assert streamed == choice["text"]
        assert streamed.rstrip("\ufffd") == text[: len(streamed.rstrip("\ufffd"))]
        endings.add(streamed.endswith("\ufffd"))
        if choice["finish_reason"] == "stop":
            break
    assert streamed == text
    assert endings == {True, False}


@pytest.mark.row("T15")
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses", "/v1/messages"])
def test_no_text_breaks_the_framing_of_events(path: str) -> None:
    reply = 'a\n\nb\r\n\r\ndata: [DONE]\n\nevent: x\rc\u2028d\u2029e\x85f\0g\\n"h</script>'
    body: dict[str, Any] = {"model": "fake", "stream": True, "max_tokens": 500}
    if path == COMPLETIONS:
        body["prompt"] = "a"
    elif path == "/v1/responses":
        body = {"model": "fake", "stream": True, "input": "a"}
    else:
        body["messages"] = BODY["messages"]

    async def check(served: Served) -> None:
        async with served.session.post(path, json=body) as response:
            assert response.status == 200
            data = (await response.read()).decode()
        assert "\r" not in data
        streamed = ""
        for event in data.split("\n\n"):
            lines = event.split("\n")
            assert all(line.startswith(("data: ", "event: ")) or not line for line in lines)
            value = "".join(line[6:] for line in lines if line.startswith("data: "))
            streamed += _text(json.loads(value)) if value not in ("", "[DONE]") else ""
        assert streamed == reply

    run_with_server(FakeEngine(reply=reply), check)


def _text(event: dict[str, Any]) -> str:
    """Returns the text of one event of any API."""
    if "choices" in event:
        choice = event["choices"][0]
        return choice.get("text") or choice.get("delta", {}).get("content") or ""
    delta = event.get("delta")
    if event.get("type") == "response.output_text.delta":
        return str(delta)
    return str(delta.get("text", "")) if isinstance(delta, dict) else ""
