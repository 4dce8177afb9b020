"""The request with which an engine attaches to a node: the layers' shapes, pages, and its epoch.

The node does not know how K/V is partitioned: a shard of the heads is a layer with fewer heads, a
shard of the tokens is a page with fewer tokens. Both sides compute the same addresses with
`NodeLayout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import lcm

from memory.attention.layouts import KV_TYPES, Layout, make_layout
from memory.attention.seam import AttentionLayer, kv_owner, layers_in
from memory.attention.tiled import TILED_TYPES, TiledKVLayout, is_selectable
from memory.nodes.wire import ErrorCode, WireError
from memory.policies.selection import Selection, selection_of
from memory.policies.setting import SELECTIONS, KVPolicy
from quant.kv import GROUPS

STRIPE_TOKENS = 16
"""Tokens in a tile of K/V, and in a stripe of partition mode `sequence`."""
_SYSTEM_PAGE_BYTES = 4096
_LINE_BYTES = 64
_MAX_LAYERS, _MAX_HEADS, _MAX_HEAD_DIM = 1024, 4096, 1024
_MAX_NUMBER = 1e30  # of scales, caps and sinks; the check refuses NaN, too
_MAX_RANGES = 1 << 20
_MAX_SLOTS = 1 << 24
_MAX_PAGES = 1 << 22
_MAX_ROWS = 1 << 16
_MAX_STRIPES = 64
MAX_ADDRESSES = 1 << 46  # about the bytes that a process can reserve
_MAX_RANGE_TOKENS = (1 << 31) - 1  # the kernels count in 32 bits
_MAX_PARTS = 1 << 20  # a part is a range in a layer group
_MAX_ALL_SLOTS = 1 << 26  # each may take 4 bytes of a node's accounting
_FREE_ACCOUNTING_BYTES = 16 << 20  # for each engine
NODE_MAPPINGS = 60_000
"""Mappings for all engines of a node; Linux allows a process 65,530."""
_SPARE_MAPPINGS = 64


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """An engine's request for a session with pages of a node.

    A later epoch of an engine ends the session of an earlier one. group_layers and page_tokens
    have, for each layer group, the numbers of its layers and the tokens in one page; num_places has
    the page slots of a range. The engine wants num_pages pages and accepts min_pages. max_rows is
    the most rows of one message. With prefix_only rows attend over the K/V before the step alone.
    With by_segment a range is a segment of a sequence, and rows attend over the segment alone. With
    is_question the node only answers what it would grant. kv_policy: by which rows of answers
    select what they read; None: they read everything. A node that knows it repeats it in its
    answer. stripe: where rows select and a node has some tokens of a sequence (prefix_only), the
    node has tiles i, i + n, ... of each, as (i, n), so that rows choose among those of n nodes.
    """

    engine: str
    epoch: int
    kv_dtype: str
    kv_group: int
    layers: list[AttentionLayer]
    group_layers: list[list[int]]
    page_tokens: list[int]
    num_places: list[int]
    num_ranges: int
    num_pages: int
    min_pages: int
    max_rows: int
    prefix_only: bool = False
    by_segment: bool = False
    is_question: bool = False
    kv_policy: KVPolicy | None = None
    stripe: tuple[int, int] | None = None

    def to_json(self) -> dict[str, object]:
        content = asdict(self)
        for name in ("kv_policy", "stripe"):
            if content[name] is None:  # nodes of earlier versions do not miss it
                del content[name]
        return content

    @property
    def policy_answer(self) -> dict[str, object] | None:
        """What a node answers that knows the kv_policy, and budgets of single queries beside it."""
        return None if self.kv_policy is None else asdict(self.kv_policy) | {"by_query": True}

    @property
    def selection(self) -> Selection | None:
        """What rows of answers read, with counts of its own; None: everything."""
        return selection_of(self.kv_policy)

    @classmethod
    def from_json(cls, content: dict[str, object]) -> AttachRequest:
        """Parses a request. Raises WireError with code SHAPE, which names the field."""
        fields = _Fields(content)
        count = fields.integer("num_ranges", 1, _MAX_RANGES)
        request = cls(
            engine=fields.name("engine"),
            epoch=fields.integer("epoch", 1, 2**32 - 1),
            kv_dtype=fields.name("kv_dtype"),
            kv_group=fields.integer("kv_group", 1, _MAX_HEAD_DIM),
            layers=[_layer(item) for item in fields.items("layers", _MAX_LAYERS)],
            group_layers=[
                _integers("group_layers", item, _MAX_LAYERS)
                for item in fields.items("group_layers", _MAX_LAYERS)
            ],
            page_tokens=_integers("page_tokens", fields.get("page_tokens"), _MAX_SLOTS),
            num_places=_integers("num_places", fields.get("num_places"), _MAX_SLOTS),
            num_ranges=count,
            num_pages=fields.integer("num_pages", 1, _MAX_PAGES),
            min_pages=fields.integer("min_pages", 1, _MAX_PAGES),
            max_rows=fields.integer("max_rows", 1, _MAX_ROWS),
            prefix_only=fields.flag("prefix_only"),
            by_segment=fields.flag("by_segment"),
            is_question=fields.flag("is_question"),
            kv_policy=_policy(content.get("kv_policy")),
            stripe=_stripe(content.get("stripe")),
        )
        request.check()
        return request

    def check(self) -> None:
        """Raises WireError if the fields do not fit each other."""
        if self.kv_dtype not in KV_TYPES or self.kv_group not in GROUPS:
            raise _shape(
                f"kv_dtype {self.kv_dtype!r} with kv_group {self.kv_group} is not supported"
            )
        numbers = sorted(number for ids in self.group_layers for number in ids)
        if numbers != list(range(len(self.layers))):
            raise _shape("group_layers must name every layer once")
        if not len(self.group_layers) == len(self.page_tokens) == len(self.num_places):
            raise _shape(
                "group_layers, page_tokens and num_places must have an item for each group"
            )
        if any(tokens % STRIPE_TOKENS or not tokens for tokens in self.page_tokens):
            raise _shape(f"page_tokens must be multiples of {STRIPE_TOKENS}")
        if min(self.num_places) < 1 or self.min_pages > self.num_pages:
            raise _shape("num_places and min_pages must be positive, min_pages within num_pages")
        sizes = zip(self.num_places, self.page_tokens, strict=True)
        if any(slots * tokens > _MAX_RANGE_TOKENS for slots, tokens in sizes):
            raise _shape(f"a range must have {_MAX_RANGE_TOKENS} tokens at most")
        num_parts = self.num_ranges * len(self.num_places)
        if num_parts > _MAX_PARTS or self.num_ranges * sum(self.num_places) > _MAX_ALL_SLOTS:
            raise _shape(f"{num_parts} range parts with page slots {self.num_places} are too many")
        for ids in self.group_layers:
            self._check_shares(ids)
        if self.kv_dtype in TILED_TYPES:
            for layer in self.layers:
                if not TiledKVLayout.supports([layer], self.kv_dtype):
                    raise _shape(f"head_dim {layer.head_dim} has no {self.kv_dtype} K/V")
        if self.by_segment and (self.prefix_only or any(x.window is not None for x in self.layers)):
            raise _shape("segments have neither windows nor prefix_only")
        if self.kv_policy is not None and (
            self.kv_dtype not in TILED_TYPES
            or self.by_segment
            or self.prefix_only != (self.stripe is not None)
        ):
            raise _shape(
                f"kv_policy {self.kv_policy.name} needs whole ranges of K/V in tiles, or a stripe"
            )
        if self.stripe is not None and (
            self.kv_policy is None
            or len(self.group_layers) > 1
            or any(x.window is not None for x in self.layers)
        ):
            raise _shape("a stripe needs a kv_policy and one group of layers without windows")
        if self.kv_policy is not None and self._num_selecting_groups() > 1:
            raise _shape(f"kv_policy {self.kv_policy.name} is for one group of layers")
        if any(layer.scale <= 0 for layer in self.layers if layer.value_dim is not None):
            raise _shape("the scale of attention over latents must be positive")

    def _num_selecting_groups(self) -> int:
        """Returns how many groups have layers whose rows select: what they read is planned for each
        group, row by row."""
        is_selected = [is_selectable(layer) for layer in self.layers]
        return sum([any(is_selected[i] for i in ids) for ids in self.group_layers])

    def _check_shares(self, ids: list[int]) -> None:
        for number in ids:
            try:
                owner = kv_owner(self.layers, number)
            except ValueError as error:
                raise _shape(str(error)) from error
            if owner not in ids or (owner != number and ids.index(owner) > ids.index(number)):
                raise _shape(f"layer {owner} must be in the group of layer {number}, before it")


def growth_of(request: AttachRequest, num_pages: int) -> int:
    """Returns how many mappings running sequences may add later: one for each page, and a gap or
    two for each range in each group."""
    return num_pages + 2 * min(_num_parts(request), num_pages)


def least_mappings(request: AttachRequest, num_pages: int) -> int:
    """Returns the fewest mappings that a node promises with so many pages."""
    return growth_of(request, num_pages) + num_pages + _SPARE_MAPPINGS


def most_pages(request: AttachRequest, num_mappings: int) -> int:
    """Returns the most pages whose least_mappings do not exceed num_mappings."""
    pages, parts = max(0, num_mappings - _SPARE_MAPPINGS), _num_parts(request)
    return pages // 4 if pages // 4 < parts else (pages - 2 * parts) // 2


def _num_parts(request: AttachRequest) -> int:
    return request.num_ranges * len(request.group_layers)


def accounting_bytes(num_ranges: int, num_places: Sequence[int]) -> int:
    """Returns the part of a node's page slot tables that counts as K/V memory, in bytes."""
    return max(0, 4 * num_ranges * sum(num_places) - _FREE_ACCOUNTING_BYTES)


class NodeLayout:
    """The addresses of an AttachRequest's K/V. Pages have one size. The reservation has a part for
    each range and group: part = group * num_ranges + range."""

    def __init__(self, request: AttachRequest) -> None:
        self.request = request
        self.groups: list[Layout] = [
            make_layout(
                layers_in(request.layers, ids),
                request.kv_dtype,
                request.kv_group,
                has_bounds=request.kv_policy is not None,
            )
            for ids in request.group_layers
        ]
        self.windows = [_widest(layout.layers) for layout in self.groups]
        self.page_bytes = self._fitting_page()
        for layout, tokens in zip(self.groups, request.page_tokens, strict=True):
            layout.pad(self.page_bytes // tokens * layout.tile_tokens)
        self.group_offsets = [0]
        for num_places in request.num_places:
            size_bytes = num_places * self.page_bytes * request.num_ranges
            self.group_offsets.append(self.group_offsets[-1] + size_bytes)

    def _fitting_page(self) -> int:
        """Returns the bytes of a page that holds a whole number of tokens of every group, slightly
        padded if necessary, so that a range has the same stride across its pages."""
        unit, least = _SYSTEM_PAGE_BYTES, 0
        for layout, tokens in zip(self.groups, self.request.page_tokens, strict=True):
            unit = lcm(unit, tokens // layout.tile_tokens * _LINE_BYTES)
            least = max(least, tokens * layout.token_bytes)
        return -(-least // unit) * unit

    @property
    def total_bytes(self) -> int:
        """The reservation's virtual bytes."""
        return self.group_offsets[-1]

    @property
    def is_addressable(self) -> bool:
        return self.total_bytes <= MAX_ADDRESSES

    def part_offset(self, part: int) -> int:
        """Returns where a part begins, in bytes from the start of the reservation."""
        group, index = divmod(part, self.request.num_ranges)
        return self.group_offsets[group] + index * self.range_bytes(group)

    def range_bytes(self, group: int) -> int:
        """Returns the distance in bytes from one range of a group to the next."""
        return self.request.num_places[group] * self.page_bytes


def _widest(layers: Sequence[AttentionLayer]) -> int | None:
    """Returns the largest window of some layers; None: one of them sees all keys."""
    windows = [layer.window for layer in layers if layer.window is not None]
    return max(windows) if len(windows) == len(layers) else None


class _Fields:
    def __init__(self, content: dict[str, object]) -> None:
        self._content = content

    def get(self, name: str) -> object:
        if name not in self._content:
            raise _shape(f"{name} is missing")
        return self._content[name]

    def integer(self, name: str, least: int, most: int) -> int:
        return _integer(name, self.get(name), least, most)

    def optional(self, name: str, least: int, most: int) -> int | None:
        return None if self.get(name) is None else self.integer(name, least, most)

    def number(self, name: str) -> float:
        return _number(name, self.get(name))

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if type(value) is not bool:
            raise _shape(f"{name} must be true or false")
        return value

    def name(self, name: str) -> str:
        value = self.get(name)
        if not (isinstance(value, str) and 0 < len(value) <= 64 and value.isprintable()):
            raise _shape(f"{name} must be a name")
        return value

    def items(self, name: str, most: int) -> list[object]:
        return _list(name, self.get(name), most)


def _integer(name: str, value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise _shape(f"{name} must be an integer from {least} to {most}")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _shape(f"{name} must be a number")
    if not -_MAX_NUMBER <= value <= _MAX_NUMBER:
        raise _shape(f"{name} must be a number")
    return float(value)


def _list(name: str, value: object, most: int) -> list[object]:
    if not isinstance(value, list) or not 0 < len(value) <= most:
        raise _shape(f"{name} must be a list of 1 to {most}")
    return value


def _integers(name: str, value: object, most: int) -> list[int]:
    return [_integer(name, item, 0, most) for item in _list(name, value, _MAX_LAYERS)]


def _layer(value: object) -> AttentionLayer:
    if not isinstance(value, dict):
        raise _shape("layers must be objects")
    fields = _Fields(value)
    heads = fields.integer("num_heads", 1, _MAX_HEADS)
    kv_heads = fields.integer("num_kv_heads", 1, heads)
    if heads % kv_heads:
        raise _shape("num_kv_heads must divide num_heads")
    soft_cap = fields.number("soft_cap")
    if soft_cap < 0:
        raise _shape("soft_cap must not be negative")
    dim = fields.integer("head_dim", 1, _MAX_HEAD_DIM)
    if fields.get("value_dim") is not None and (kv_heads != 1 or fields.get("window") is not None):
        raise _shape("a layer with value_dim has one K/V head and no window")
    return AttentionLayer(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=fields.number("scale"),
        window=fields.optional("window", 1, 2**31 - 1),
        soft_cap=soft_cap,
        sinks=_sinks(fields.get("sinks"), heads),
        shares=fields.optional("shares", 0, _MAX_LAYERS),
        value_dim=fields.optional("value_dim", 1, dim),
    )


def _policy(value: object) -> KVPolicy | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _shape("kv_policy must be an object")
    fields = _Fields(value)
    name = fields.name("name")
    if name not in SELECTIONS:
        raise _shape(f"kv_policy {name!r} is none that selects on nodes of this version")
    tokens = fields.optional("tokens", 1, _MAX_RANGE_TOKENS)
    share = None if fields.get("share") is None else fields.number("share")
    if (tokens is None) is (share is None) or (share is not None and not 0 < share <= 1):
        raise _shape("kv_policy must have a number of tokens, or a share above 0 and at most 1")
    return KVPolicy(name, tokens, share, fields.integer("least", 1, _MAX_RANGE_TOKENS))


def _stripe(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise _shape("stripe must be two integers")
    count = _integer("stripe", value[1], 1, _MAX_STRIPES)
    return _integer("stripe", value[0], 0, count - 1), count


def _sinks(value: object, num_heads: int) -> tuple[float, ...] | None:
    if value is None:
        return None
    sinks = tuple(_number("sinks", item) for item in _list("sinks", value, _MAX_HEADS))
    if len(sinks) != num_heads:
        raise _shape(f"sinks must have a number for each of {num_heads} heads")
    return sinks


def _shape(text: str) -> WireError:
    return WireError(ErrorCode.SHAPE, text)


def layers_of(request: AttachRequest, group: int) -> Sequence[AttentionLayer]:
    return [request.layers[number] for number in request.group_layers[group]]
