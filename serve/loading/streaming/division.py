"""Divides a model into what is read in every step, what is read now and then, and the rest."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from serve.errors import ConfigError
from serve.loading.streaming import tables
from serve.loading.streaming.experts import ExpertSlots
from serve.loading.streaming.placement import Mixtures, Needs, is_large
from serve.loading.streaming.source import can_split, split_layer
from serve.loading.streaming.units import (
    EXPERT,
    HEAD,
    LAYER,
    TABLE,
    MixtureUse,
    ModelUses,
    Piece,
    Unit,
    Use,
    spans_of,
    unit_of,
)
from serve.models.decoder import DecoderWeights, Lookup
from serve.models.layers.blocks import Block, MixtureMlp, SideBySideMlp
from serve.models.packed_cache.layout import PAGE, LayerEntry, Span, TensorEntry
from serve.models.packed_cache.writer import round_up

LINE = 64


@dataclass(slots=True)
class Group:
    """Mixtures of one form, whose experts share slots. units: of each mixture's experts; down_at:
    where the product down is in a slot."""

    top_k: int
    mixtures: list[MixtureUse] = field(default_factory=list)
    units: list[list[Unit]] = field(default_factory=list)
    down_at: int = 0
    memory: Tensor | None = None
    slots: ExpertSlots | None = None

    def add(self, mixture: MixtureUse) -> None:
        ups, downs = ([use.layers[0] for use in uses] for uses in (mixture.ups, mixture.downs))
        self.down_at = round_up(_extent(ups[0]), PAGE)
        self.mixtures.append(mixture)
        names = [f"layer {mixture.layer}, expert {use.expert}" for use in mixture.ups]
        self.units.append([_expert(*each) for each in zip(names, ups, downs, strict=True)])


class Division:
    """What a model is made of.

    groups: mixtures that can stream. units: the layers, and behind them the parts of the last
    product, in the order of a step; spans: of each of them; head: those parts. tables: those of
    which a step reads rows. fixed: what is always resident. needs: their sizes.
    """

    def __init__(self, uses: ModelUses, weights: DecoderWeights) -> None:
        """weights: the model over addresses without memory. ConfigError if it cannot stream."""
        self.uses = uses
        for use in uses.uses:
            if not use.entry.parts:
                raise ConfigError(
                    "weight_memory_bytes: this checkpoint has weights that are not in the file of"
                    f" packed weights ({use.entry.call})"
                )
        self.num_layers = uses.num_layers
        self.groups = self._grouped(weights)
        self.fixed: list[Span] = []
        self.tables: list[Use] = []
        self.head: list[LayerEntry] = []
        self.spans: list[list[Span]] = [[] for _ in range(self.num_layers)]
        self._sort(_looks_up(weights))
        self.units = [unit_of(f"layer {n}", self.spans[n]) for n in range(self.num_layers)]
        for part in self.head:
            self.spans.append(spans_of(part))
            self.units.append(unit_of("the last product", self.spans[-1]))
        self.needs = self._needs()

    def _sort(self, looks_up: bool) -> None:
        in_slots = {mixture.layer for group in self.groups for mixture in group.mixtures}
        heads: list[Use] = []
        for use in self.uses.uses:
            if use.role == EXPERT and use.layer in in_slots:
                continue
            if use.role in (LAYER, EXPERT) and use.layer < self.num_layers:
                self.spans[use.layer] += use.spans
            elif use.role == TABLE and looks_up and not self.tables and _is_large(use):
                self.tables.append(use)
            elif use.role == HEAD and can_split(use) and not heads:
                heads.append(use)
            else:
                self.fixed += use.spans
        largest = max((sum(each.num_bytes for each in spans) for spans in self.spans), default=0)
        for use in heads:
            self.head = split_layer(use.layers[0], largest)

    def _grouped(self, weights: DecoderWeights) -> list[Group]:
        groups: dict[tuple[object, ...], Group] = {}
        for mixture in self.uses.mixtures:
            if mixture.layer >= self.num_layers:
                continue
            found = mixture_of(weights.blocks[mixture.layer])
            if found is None:
                continue
            group = groups.setdefault(mixture.signature, Group(0))
            group.top_k = max(group.top_k, found.router.kind.top_k)
            group.add(mixture)
        return list(groups.values())

    def _needs(self) -> Needs:
        return Needs(
            fixed_bytes=sum(round_up(max(1, span.num_bytes), LINE) for span in self.fixed),
            table_bytes=sum(span.num_bytes for use in self.tables for span in use.spans),
            row_bytes=sum(map(_row_bytes, self.tables)),
            units=tuple(unit.num_bytes for unit in self.units),
            mixtures=tuple(
                Mixtures(tuple(map(len, group.units)), group.top_k, group.units[0][0].num_bytes)
                for group in self.groups
            ),
        )


def _is_large(table: Use) -> bool:
    return is_large(sum(span.num_bytes for span in table.spans), _row_bytes(table))


def _row_bytes(table: Use) -> int:
    (entry,) = table.entry.parts
    assert isinstance(entry, TensorEntry)
    return tables.memory_for(entry.data.num_bytes // entry.shape[0])


def mixture_of(block: Block) -> MixtureMlp | None:
    """Returns the mixture of a block, if it has one."""
    mlp = block.mlp
    if isinstance(mlp, SideBySideMlp):
        return mlp.mixture
    return mlp if isinstance(mlp, MixtureMlp) else None


def _looks_up(weights: DecoderWeights) -> bool:
    """Returns whether whole rows of the model's first table, the embedding, are looked up."""
    embed = weights.embed
    return isinstance(embed, Lookup) and embed.columns is None


def _extent(entry: LayerEntry) -> int:
    first = entry.buffers[0].start
    return max(span.start + span.num_bytes for span in spans_of(entry)) - first


def _expert(name: str, up: LayerEntry, down: LayerEntry) -> Unit:
    """Returns the unit of an expert: up, and down on the next page. Both begin a page."""
    pieces: list[Piece] = []
    at = 0
    for entry in (up, down):
        start = entry.buffers[0].start
        unit = unit_of(name, [Span(start, _extent(entry))])
        pieces += [piece._replace(at=piece.at + at) for piece in unit.pieces]
        at += unit.num_bytes
    return Unit(name, tuple(pieces), at)
