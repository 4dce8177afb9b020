"""Messages of memory nodes survive packing and unpacking, and malformed ones are refused."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import asdict, replace

import orjson
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from memory.attention.seam import AttentionLayer
from memory.nodes.attach import KV_TYPES, AttachRequest, NodeLayout
from memory.nodes.wire import (
    HEADER_BYTES,
    MAX_JSON_BYTES,
    Append,
    Edit,
    EditKind,
    ErrorCode,
    Header,
    Kind,
    NodePlan,
    Query,
    WireError,
    WireFormat,
    WireType,
    pack_json,
    pack_plan,
    read_header,
    read_json,
    read_plan,
)
from memory.nodes.wire_rows import WireRows, encode, kv_type, largest_message

U8, U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))
HEADERS = st.builds(Header, st.sampled_from(Kind), U32, U64, U16, st.sampled_from(WireType), U32)
PLANS = st.builds(
    NodePlan,
    st.lists(st.builds(Edit, st.sampled_from(EditKind), U32, U32, U32, U32), max_size=9),
    st.lists(st.builds(Query, U32, U32, U32, U32), max_size=9),
    st.lists(st.builds(Append, U32, U32, U32), max_size=9),
    *[st.just([])] * 4,
)


def view(data: bytes) -> memoryview:
    return memoryview(bytearray(data))


def code_of(read, *arguments) -> ErrorCode | None:
    """Returns the code of the WireError that is raised, or None; any other exception is a
    failure."""
    try:
        read(*arguments)
    except WireError as error:
        return error.code
    return None


@given(HEADERS)
def test_headers_round_trip(header):
    assert len(header.packed()) == HEADER_BYTES
    assert read_header(view(header.packed() + b"what follows")) == header


@given(U32, U64, PLANS)
def test_plans_round_trip(epoch, number, plan):
    message = view(pack_plan(epoch, number, plan))
    assert read_header(message) == Header(Kind.PLAN, epoch, number)
    assert read_plan(message) == plan


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=5), JSON_VALUES.filter(lambda x: x == x), max_size=5))
def test_json_round_trips(content):
    message = view(pack_json(Kind.ATTACH, 7, content))
    assert read_header(message) == Header(Kind.ATTACH, 7)
    assert read_json(message) == orjson.loads(orjson.dumps(content))


@given(st.binary(max_size=200))
@example(b"")
@example(b"GET / HTTP/1.1\r\nHost: node\r\n\r\n")
@example(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40))
@example(b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00\x8c\x02os" + bytes(40))
def test_random_bytes_are_refused(data):
    """HTTP, TLS and pickle bytes are among them."""
    assert code_of(read_header, view(data)) in (ErrorCode.FORM, None)
    for read in (read_plan, read_json):
        assert code_of(read, view(bytes(HEADER_BYTES) + data)) in (ErrorCode.FORM, None)


@pytest.mark.parametrize(
    ("offset", "value", "match"),
    [
        (0, b"\x00", "not a message"),
        (2, b"\x02", "version 2, here it is 4"),
        (2, b"\x00", "version 0"),
        (3, b"\x00", "Kind"),
        (3, b"\x0d", "Kind"),
        (18, b"\x03", "WireType"),
        (24, b"\x01", "not a message"),
        (31, b"\x01", "not a message"),
    ],
)
def test_every_field_of_a_header_is_checked(offset, value, match):
    data = bytearray(Header(Kind.QUERY, 1, 2, 3, WireType.INT8, 4).packed())
    read_header(memoryview(data))
    data[offset : offset + 1] = value
    with pytest.raises(WireError, match=match) as caught:
        read_header(memoryview(data))
    assert caught.value.code is ErrorCode.FORM


@given(PLANS, st.data())
def test_a_plan_of_the_wrong_length_is_refused(plan, data):
    whole = pack_plan(1, 1, plan)
    cut = data.draw(st.integers(HEADER_BYTES, len(whole) - 1))
    assert code_of(read_plan, view(whole[:cut])) is ErrorCode.FORM
    assert code_of(read_plan, view(whole + b"\0")) is ErrorCode.FORM


@pytest.mark.parametrize("counts", [(2**32 - 1,) * 3, (2**31, 0, 0), (1, 0, 0), (0, 0, 2**32 - 1)])
@pytest.mark.row("M4")
def test_huge_counts_are_refused_before_memory_is_allocated(counts):
    body = struct.pack("<III", *counts)
    assert code_of(read_plan, view(bytes(HEADER_BYTES) + body)) is ErrorCode.FORM


@given(PLANS, st.data())
def test_a_mutated_plan_is_a_plan_or_refused(plan, data):
    whole = bytearray(pack_plan(1, 1, plan))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(U8)
    assert code_of(read_header, memoryview(whole)) in (ErrorCode.FORM, None)
    assert code_of(read_plan, memoryview(whole)) in (ErrorCode.FORM, None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"1",
        b"{",
        b"\xff\xfe",
        b'{"a":NaN}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":"' + b"x" * MAX_JSON_BYTES + b'"}',
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body):
    message = view(Header(Kind.ATTACH, 1).packed() + body)
    assert code_of(read_json, message) is ErrorCode.FORM


# ---- ATTACH

LAYER = AttentionLayer(8, 4, 64, 0.125, None)
REQUEST = AttachRequest(
    engine="e",
    epoch=1,
    kv_dtype="float32",
    kv_group=64,
    layers=[LAYER, LAYER, replace(LAYER, window=40)],
    group_layers=[[0, 1], [2]],
    page_tokens=[32, 64],
    num_places=[16, 8],
    num_ranges=6,
    num_pages=100,
    min_pages=1,
    max_rows=256,
)


def as_sent(request: AttachRequest) -> dict:
    return orjson.loads(orjson.dumps(request.to_json()))


@pytest.mark.parametrize("kv_dtype", KV_TYPES)
def test_an_attach_request_round_trips(kv_dtype):
    request = replace(REQUEST, kv_dtype=kv_dtype)
    read = AttachRequest.from_json(as_sent(request))
    assert read == request
    assert asdict(read) == asdict(request)


def with_layer(**changed) -> dict:
    return {"layers": [asdict(LAYER), asdict(LAYER) | changed, asdict(LAYER) | {"window": 40}]}


BAD_REQUESTS = {
    "no engine": {"engine": ""},
    "a long name": {"engine": "x" * 65},
    "a number as a name": {"engine": 3},
    "a name that is no line": {"engine": "a\nb"},
    "epoch 0": {"epoch": 0},
    "epoch of 33 bits": {"epoch": 2**32},
    "true as an epoch": {"epoch": True},
    "a fraction": {"num_pages": 1.5},
    "another type": {"kv_dtype": "float64"},
    "another group": {"kv_group": 7},
    "no layers": {"layers": []},
    "no list of layers": {"layers": {"0": 1}},
    "a layer that is none": {"layers": [1]},
    "too many layers": {"layers": [asdict(LAYER)] * 1025},
    "no heads": with_layer(num_heads=0),
    "too many heads": with_layer(num_heads=1 << 30, num_kv_heads=1 << 30),
    "heads that do not divide": with_layer(num_kv_heads=3),
    "more K/V heads than heads": with_layer(num_kv_heads=16),
    "a huge head": with_layer(head_dim=1 << 20),
    "a negative head": with_layer(head_dim=-1),
    "no scale": with_layer(scale=None),
    "an endless scale": with_layer(scale=1e300),
    "a scale as text": with_layer(scale="1"),
    "true as a scale": with_layer(scale=True),
    "a window of 0": with_layer(window=0),
    "a huge window": with_layer(window=1 << 31),
    "a layer in no group": {"group_layers": [[0], [2]]},
    "a layer in two groups": {"group_layers": [[0, 1], [1, 2]]},
    "a layer that is not there": {"group_layers": [[0, 1], [3]]},
    "fewer groups": {"page_tokens": [32]},
    "more slots": {"num_places": [16, 8, 8]},
    "no tokens": {"page_tokens": [0, 64]},
    "no whole tiles": {"page_tokens": [32, 65]},
    "no slots": {"num_places": [16, 0]},
    "negative slots": {"num_places": [16, -8]},
    "tokens that the kernels cannot count": {
        "page_tokens": [1 << 20, 64],
        "num_places": [1 << 11, 8],
    },
    "more slots than the accounting allows": {"num_places": [1 << 23, 8], "num_ranges": 16},
    "more parts than the accounting allows": {
        "num_ranges": 1 << 20,
        "group_layers": [[0], [1], [2]],
    }
    | {"page_tokens": [32] * 3, "num_places": [1] * 3},
    "no ranges": {"num_ranges": 0},
    "no pages": {"num_pages": 0},
    "too many pages": {"num_pages": 1 << 40},
    "more at least than at most": {"min_pages": 101},
    "no rows": {"max_rows": 0},
    "too many rows": {"max_rows": 1 << 20},
    "a number as a flag": {"prefix_only": 1},
}


@pytest.mark.parametrize("changed", BAD_REQUESTS.values(), ids=BAD_REQUESTS)
@pytest.mark.row("M6")
def test_absurd_requests_are_refused(changed):
    assert code_of(AttachRequest.from_json, as_sent(REQUEST) | changed) is ErrorCode.SHAPE


@pytest.mark.parametrize("name", sorted(as_sent(REQUEST)))
def test_every_field_is_needed(name):
    content = as_sent(REQUEST)
    del content[name]
    with pytest.raises(WireError, match=f"{name} is missing"):
        AttachRequest.from_json(content)


@pytest.mark.parametrize(
    ("head_dim", "is_fine"), [(16, True), (512, True), (20, False), (528, False), (1024, False)]
)
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_tiles_need_heads_that_their_kernels_have(head_dim, is_fine, kv_dtype):
    layers = [replace(LAYER, head_dim=head_dim)] * 3
    layers[2] = replace(layers[2], window=40)
    content = as_sent(replace(REQUEST, kv_dtype=kv_dtype, layers=layers))
    assert (code_of(AttachRequest.from_json, content) is None) == is_fine


@given(st.data())
def test_requests_with_random_values_are_refused_or_have_a_layout(data):
    """A request that passes the checks has pages and a reservation within bounds."""
    content = as_sent(REQUEST)
    for name in data.draw(st.lists(st.sampled_from(sorted(content)), max_size=3)):
        numbers = st.integers(0, 2**34) | st.sampled_from([16, 2**12, 2**20, 2**24])
        content[name] = data.draw(
            JSON_VALUES | numbers | st.lists(numbers, max_size=3) | st.sampled_from(KV_TYPES)
        )
    code = code_of(AttachRequest.from_json, content)
    if code is not None:
        assert code is ErrorCode.SHAPE
        return
    request = AttachRequest.from_json(content)
    layout = NodeLayout(request)
    assert layout.page_bytes % 4096 == 0
    for group, tokens in zip(layout.groups, request.page_tokens, strict=True):
        assert layout.page_bytes == tokens * group.token_bytes
    parts = range(request.num_ranges * len(layout.groups))
    offsets = [layout.part_offset(part) for part in (*parts[:2], parts[-1])]
    assert offsets == sorted(offsets)
    assert offsets[-1] + layout.range_bytes(len(layout.groups) - 1) == layout.total_bytes


# ---- rows


def joined(parts: list[torch.Tensor]) -> memoryview:
    return view(b"".join(bytes(part.contiguous().view(-1).view(torch.uint8)) for part in parts))


def bytes_of(parts):
    return sum(part.numel() * part.element_size() for part in parts)


@pytest.mark.parametrize("dtype", WireType)
@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_rows_round_trip(dtype, num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    rows = WireRows(8, 4, 32)
    q = torch.randn(num_rows, 8, 32, generator=generator)
    lse = torch.randn(num_rows, 8, generator=generator)
    bound = {WireType.FLOAT32: 0, WireType.BFLOAT16: 2e-2, WireType.INT8: 3e-2}[dtype]
    header = Header(Kind.QUERY, 1, 1, 0, dtype, num_rows)

    def differ(one, other):
        return float((one - other.float()).abs().max())

    parts = encode(q, dtype)
    assert bytes_of(parts) == rows.q_bytes(num_rows, dtype)
    assert differ(q, rows.read_q(joined(parts), header)) <= bound

    parts = [*encode(q, dtype), lse]
    assert bytes_of(parts) == rows.partial_bytes(num_rows, dtype)
    out, again = rows.read_partial(joined(parts), header)
    assert differ(q, out) <= bound and torch.equal(lse, again)

    k, v = q[:, :4], q[:, 4:]
    both = [x.to(torch.float32 if dtype is WireType.FLOAT32 else torch.bfloat16) for x in (k, v)]
    update = header._replace(kind=Kind.UPDATE, dtype=kv_type(dtype))
    assert bytes_of(both) == rows.kv_bytes(num_rows, dtype)
    read = rows.read_kv(joined(both), update)
    assert max(differ(k, read[0]), differ(v, read[1])) <= 2e-2
    largest = largest_message(
        [AttentionLayer(8, 4, 32, 1.0, None)], num_rows, WireFormat(dtype, kv_type(dtype))
    )
    assert largest == HEADER_BYTES + max(bytes_of(both), rows.partial_bytes(num_rows, dtype))


@pytest.mark.parametrize("dtype", WireType)
@pytest.mark.parametrize("change", [-1, 1, 64])
@pytest.mark.row("M6")
def test_rows_of_another_size_are_refused(dtype, change):
    rows = WireRows(8, 4, 32)
    header = Header(Kind.QUERY, 1, 1, 0, dtype, 5)
    for read, due in (
        (rows.read_q, rows.q_bytes(5, dtype)),
        (rows.read_kv, rows.kv_bytes(5, dtype)),
        (rows.read_partial, rows.partial_bytes(5, dtype)),
    ):
        assert code_of(read, view(bytes(due)), header) is None
        assert code_of(read, view(bytes(due + change)), header) is ErrorCode.SHAPE
        huge = header._replace(rows=2**32 - 1)
        assert code_of(read, view(bytes(due)), huge) is ErrorCode.SHAPE


def test_heads_without_an_8_bit_form_are_refused():
    rows = WireRows(4, 2, 20)
    header = Header(Kind.QUERY, 1, 1, 0, WireType.INT8, 3)
    body = view(bytes(rows.q_bytes(3, WireType.INT8)))
    assert code_of(rows.read_q, body, header) is ErrorCode.SHAPE


def test_reading_rows_copies_nothing():
    rows = WireRows(2, 1, 16)
    body = bytearray(rows.q_bytes(2, WireType.FLOAT32))
    address = ctypes.addressof(ctypes.c_char.from_buffer(body))
    q = rows.read_q(memoryview(body), Header(Kind.QUERY, 1, 1, 0, WireType.FLOAT32, 2))
    assert q.data_ptr() == address
