"""Untrusted grammars: which are refused, what compiling costs and what the cache keeps."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve.config import default_model_path
from serve.errors import OverloadedError, RequestError
from serve.structured import compiler as grammar_module
from serve.structured.compiler import COMPILE_MEMORY_BYTES, GrammarCache, GrammarCompiler
from serve.structured.grammar_source import check_regex, grammar_of
from serve.structured.schema_ends import has_finite_text
from serve.structured_output import StructuredOutput
from serve.text.tokenizer import Tokenizer
from tests.support.profile import examples


@pytest.fixture(scope="module")
def compiler():
    tokenizer = Tokenizer.load(default_model_path())
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size, {tokenizer.eos_token_id})
    yield made
    made.close()


def schema(value):
    return StructuredOutput("json_schema", value if isinstance(value, str) else json.dumps(value))


def test_a_refusal_is_kept(compiler, monkeypatch):
    """Finding it out may take as long as compiling."""
    bad = schema({"anyOf": [{"type": "integer", "maximum": 1 << 70}, {"$ref": "http://a/b"}]})
    first = refused(compiler, bad)
    monkeypatch.setattr(grammar_module, "grammar_of", None)
    assert refused(compiler, bad) == first


def test_a_process_that_does_not_start_is_no_error_of_the_grammar(monkeypatch):
    tokenizer = Tokenizer.load(default_model_path())
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size, {tokenizer.eos_token_id})
    with monkeypatch.context() as patched:
        patched.setattr("serve.sandbox.worker.STARTUP_TIMEOUT_S", 0.0)
        with pytest.raises(OverloadedError, match="did not start within 0 s"):
            made.compile(schema({"type": "integer"}))
    assert made.compile(schema({"type": "integer"}))
    made.close()


def nested(depth):
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


def refused(compiler, structured):
    began = time.monotonic()
    with pytest.raises(RequestError) as caught:
        compiler.compile(structured)
    assert time.monotonic() - began < 20
    assert (caught.value.code, caught.value.param) == ("invalid_schema", "structured")
    assert len(str(caught.value)) < 500
    return str(caught.value)


OBJECTS = {f"p{i}": {"type": "integer"} for i in range(10_000)}
REFUSED_SCHEMAS = [
    # G1
    ({"type": "strnig"}, "strnig"),
    ({"type": ["object", 5]}, "type"),
    ("5", "object"),
    ('""', "object"),
    ("", "JSON"),
    ("true", "object"),
    ("[]", "object"),
    ('{"type": ', "JSON"),
    # G2
    (nested(1000), "deeper"),
    ("[" * 100_000, "deeper"),
    ('{"a":' * 30_000 + "1" + "}" * 30_000, "deeper|larger"),
    # G3
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "requires itself"),
    ({"$ref": "http://169.254.169.254/x"}, "to another document"),
    ({"$ref": "file:///etc/passwd"}, "to another document"),
    ({"properties": {"a": {"$ref": "other.json#/x"}}}, "to another document"),
    ({"$ref": "#/$defs/nobody"}, "cannot be used"),
    # G4
    ({"enum": [f"v{i}" for i in range(100_000)]}, "enum|larger"),
    ({"enum": list(range(1001))}, "enum"),
    ({"type": "object", "properties": OBJECTS}, "properties|larger"),
    ({"oneOf": [{"const": i} for i in range(1000)]}, "oneOf"),
    ({"description": "x" * (1 << 20)}, "larger"),
    ({"prefixItems": [[[i]] for i in range(200)], "x": [[0] * 100] * 300}, "more than"),
    # G5
    ({"type": "string", "pattern": "a{1,1000000}"}, "too large"),
    ({"type": "string", "pattern": "((a{100}){100}){100}"}, "too large"),
    ({"type": "string", "pattern": "(?<=a)b"}, "look"),
    ({"type": "string", "pattern": r"(a)\1"}, "backreference"),
    ({"type": "string", "pattern": "(" * 30_000}, "deeper"),
    # G6
    ({"type": "array", "maxItems": 10**9}, "maxItems"),
    ({"type": "string", "minLength": 10**9}, "minLength"),
    ({"type": "string", "maxLength": 1e300}, "maxLength"),
    ('{"type": "string", "maxLength": NaN}', "maxLength"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    # G8
    ({"enum": []}, "nsatisfiable"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "nsatisfiable"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "requires itself"),
    ({"type": "string", "pattern": "^[^\\x00-\\U0010ffff]$"}, "cannot be used"),
    # G9, and keywords that the library does not support
    ({"type": "string", "pattern": "["}, "regex"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"if": {}, "then": {}}, "if"),
    ({"type": "string", "format": "nonsense"}, "format"),
    ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, "use anyOf instead"),
    ('{"const": "\\ud800"}', "surrogate"),
    ('{"const": "\\u0000", "x": "\x00"}', "zero|JSON"),
]


@pytest.mark.parametrize(
    ("source", "words"), REFUSED_SCHEMAS, ids=[words for _, words in REFUSED_SCHEMAS]
)
def test_refused_schemas(compiler, monkeypatch, source, words):
    def connect(*args):
        raise AssertionError("a schema is never fetched")

    monkeypatch.setattr(socket.socket, "connect", connect)
    message = refused(compiler, schema(source))
    assert any(word in message for word in words.split("|")), message


@pytest.mark.parametrize("bounded", [False, True])
def test_unions_told_apart_by_a_number(compiler, bounded):
    defs = {
        name: {"properties": {"kind": {"const": i}}, "required": ["kind"]}
        for i, name in enumerate("ab")
    }
    union = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": defs}
    compiler.compile(StructuredOutput("json_schema", json.dumps(union), bounded=bounded))


def test_the_vocabulary_is_sorted_when_a_grammar_is_compiled(compiler):
    """A mask that sorts it would do so beside running streams, in its request's time."""
    form = compiler.grammar(schema({"type": "integer"})).json
    assert {"single", "numeric", "text", "literals"} <= vars(form.tokens).keys()


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("regex", "(a", "unclosed"),
        ("regex", "(?!a)b", "look"),
        ("regex", "a{1,1000000}", "too large"),
        ("regex", "(" * 40 + "a" + ")" * 40, "deeper"),
        ("regex", "[^\\x00-\\U0010ffff]", "no text"),
        ("regex", "a{99999999999}", "too large"),
        ("regex", "\ud800", "surrogate"),
        ("choice", "[]", "1 to"),
        ("choice", '["a", 5]', "strings"),
        ("choice", '[""]', "strings"),
        ("choice", '"a"', "list"),
        ("choice", json.dumps([str(i) for i in range(1001)]), "1 to"),
        ("grammar", "", "cannot be used"),
        ("grammar", "start: nobody", "nobody"),
        ("grammar", 'start: "a" start', "cannot be used"),
        ("grammar", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000, "deeper"),
        ("grammar", "start: /a{9999999}/", "too large"),
        ("grammar", 'start: %json {"type": "strnig"}', "strnig"),
        ("grammar", 'start: %json {"$ref": "http://x"}', "to another document"),
        ("grammar", 'start: %json {"x-guidance": {}}', "x-guidance"),
        ("grammar", "start: %json {", "JSON"),
        ("grammar", "x" * 200_000, "larger"),
    ],
)
def test_refused_grammars(compiler, kind, source, words):
    assert words in refused(compiler, StructuredOutput(kind, source))


TREE = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}
LIST = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}


@pytest.mark.parametrize(
    ("value", "ends"),
    [
        (TREE, True),
        (TREE | {"required": ["left"]}, False),
        (LIST, True),
        ({**LIST, "$defs": {"a": {**LIST["$defs"]["a"], "minItems": 1}}}, False),
        ({"anyOf": [{"type": "null"}, TREE | {"required": ["left"]}]}, True),
        ({"allOf": [{"$ref": "#"}]}, False),
        ({"$ref": "#/$defs/0", "$defs": [{"$ref": "#/$defs/1"}, {"type": "null"}]}, True),
        ({"$ref": "#/a~1b", "a/b": {"$ref": "#/c"}, "c": {"$ref": "#/a~1b"}}, False),
        ({"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, True),
        ({"type": "object", "required": ["a"], "properties": {"b": {"$ref": "#"}}}, True),
        ({"$ref": "#/nobody"}, True),
    ],
)
def test_schemas_that_require_themselves(value, ends):
    assert has_finite_text(value) is ends


@pytest.mark.timing
@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "([a-z]*)*x", "(.*)*", "^(\\w+\\s?)*$"])
def test_no_pattern_backtracks(compiler, pattern):
    began = time.monotonic()
    compiler.compile(StructuredOutput("regex", pattern))
    assert time.monotonic() - began < 5


def test_the_size_of_a_regex():
    for pattern in ("", "a{100}b{100}", "[]x{9]{3}", r"\p{L}{10}", "(ab|c){5}(?:x){,9}", "a{x}"):
        check_regex(pattern)
    for pattern in ("(ab{64}){64}", "((a{20}){20}){20}", "a{,9999}", r"\x{41}{5000}", "(a){4097}"):
        with pytest.raises(RequestError):
            check_regex(pattern)


def test_json_is_generated_without_runs_of_spaces():
    options = json.loads(grammar_of(schema({"type": "object", "x-guidance": {"lenient": True}})))
    guidance = options["grammars"][0]["json_schema"]["x-guidance"]
    assert "lenient" not in guidance  # a client cannot change compiler options
    assert guidance["whitespace_flexible"] is False


@pytest.mark.timing
def test_a_compile_bomb_ends_with_its_child(monkeypatch):
    """The next grammar compiles after a frozen or killed child (row G10 of the catalogue)."""
    tokenizer = Tokenizer.load(default_model_path())
    monkeypatch.setattr(grammar_module, "COMPILE_TIMEOUT_S", 0.5)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, {tokenizer.eos_token_id})
    try:
        compiler.compile(StructuredOutput("regex", "a"))
        child = compiler._worker._child
        os.kill(child.process.pid, signal.SIGSTOP)
        message = refused(compiler, StructuredOutput("regex", "b"))
        assert "too complex" in message and "longer than 0.5 s" in message
        compiler.compile(StructuredOutput("regex", "c"))
        os.kill(compiler._worker._child.process.pid, signal.SIGKILL)
        compiler._worker._child.process.wait()
        compiler.compile(StructuredOutput("regex", "d"))
        # the refusal is cached, so that it does not cost half a second each time
        began = time.monotonic()
        refused(compiler, StructuredOutput("regex", "b"))
        assert time.monotonic() - began < 0.1
        # but it expires, since the machine may have been busy
        later = time.monotonic() + grammar_module.UNSURE_S
        monkeypatch.setattr(grammar_module.time, "monotonic", lambda: later)
        assert not compiler.is_cached(StructuredOutput("regex", "b"))
        assert compiler.is_cached(StructuredOutput("regex", "c"))
    finally:
        compiler.close()


def test_the_child_has_limits(compiler):
    compiler.compile(StructuredOutput("regex", "limits"))
    pid = compiler._worker._child.process.pid
    limits = {
        line[:25].strip(): line[25:].split()[0]
        for line in Path(f"/proc/{pid}/limits").read_text().splitlines()
    }
    used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * 4096
    # the limit is set at the start, and the child may have freed some pages since
    slack = 16 << 20
    assert int(limits["Max address space"]) <= used + COMPILE_MEMORY_BYTES + slack
    assert int(limits["Max cpu time"]) < 3600
    assert limits["Max file size"] == limits["Max core file size"] == "0"


def test_the_cache_is_bounded(compiler):
    """Covers row G7 of the catalogue of bad inputs."""
    cache = GrammarCache(max_entries=10, max_bytes=10 * (64 << 10) + 100_000)
    for i in range(100):
        cache.put(schema({"const": i}), "no")
        assert len(cache) <= 10
    assert cache.get(schema({"const": 99})) == "no"
    assert cache.get(schema({"const": 80})) is None
    for i in range(3):
        cache.put(schema({"const": "x" * 1000 + str(i)}), compiler.grammar(schema({"const": i})))
        assert cache.num_bytes <= 10 * (64 << 10) + 100_000
    cache.put(schema({"const": 99}), "again")
    assert cache.get(schema({"const": 99})) == "again"


def test_memory_is_bounded_over_many_schemas(compiler):
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    def compile_some(first):
        for i in range(first, first + 300):
            value = {"type": "object", "properties": {f"k{i}": {"type": "string"}}}
            compiler.compile(schema(value))

    compile_some(0)
    before = resident()
    compile_some(1000)
    compile_some(2000)
    assert resident() - before < 16 << 20
    assert len(compiler.cache) <= grammar_module.MAX_GRAMMARS


def test_a_tokenizer_without_bytes(monkeypatch):
    tokenizer = Tokenizer.load(default_model_path())
    monkeypatch.setattr(tokenizer, "pieces", None)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, {4})
    with pytest.raises(RequestError, match="tokenizer") as caught:
        compiler.compile(StructuredOutput("regex", "a"))
    assert caught.value.code == "unsupported_parameter"
    compiler.close()


KEYWORDS = st.sampled_from(
    [
        *("type", "properties", "required", "items", "minItems", "maxLength", "enum", "const"),
        *("anyOf", "allOf", "$ref", "$defs", "pattern", "patternProperties", "minimum", "x"),
    ]
)
ATOMS = (
    st.sampled_from(["object", "array", "string", "#", "#/$defs/x", "", "(a", "a{3}", "http://x"])
    | st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.sampled_from([10**30, 1e300, float("inf"), -float("inf"), float("nan")])
    | st.text(max_size=4)
)
VALUES = st.recursive(
    ATOMS, lambda each: st.lists(each, max_size=4) | st.dictionaries(KEYWORDS, each, max_size=4)
)


@examples(250)
@given(st.dictionaries(KEYWORDS, VALUES, max_size=5))
@example({"patternProperties": {}, "properties": []})
@example({"allOf": [{"patternProperties": {"a": {}}}], "patternProperties": []})
def test_any_schema_is_compiled_or_refused(compiler, value):
    """A schema is compiled or refused with a reason, and the child survives."""
    error = None
    try:
        compiler.compile(schema(value))
    except RequestError as caught:
        error = caught
    if error is not None:
        assert (error.code, error.param) == ("invalid_schema", "structured")
        assert "process ended" not in str(error)


@examples(150)
@given(
    st.sampled_from(["regex", "grammar", "choice", "json_schema"]),
    st.lists(
        st.sampled_from([*"()[]{}|*+?.^$\\\"'/ab1,:\n ", "start: ", "\\d", "{3,9}", "%json ", "é"])
        | st.characters(),
        max_size=25,
    ).map("".join),
)
def test_any_text_is_compiled_or_refused(compiler, kind, source):
    error = None
    try:
        compiler.compile(StructuredOutput(kind, source))
    except RequestError as caught:
        error = caught
    if error is not None:
        assert (error.code, error.param) == ("invalid_schema", "structured")
        assert "process ended" not in str(error)
