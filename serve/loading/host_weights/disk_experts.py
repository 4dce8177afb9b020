"""Experts that the CPU computes and of which only some are in host memory: they have the slots of
serve/loading/streaming, and the file of disk.py."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ops.backend import ExpertsOp, Fusion, LinearOp, Routing
from serve.errors import ConfigError
from serve.loading.host_weights.disk import DiskFile
from serve.loading.streaming.division import Group
from serve.loading.streaming.experts import ExpertSlots, StreamedExperts
from serve.loading.streaming.placement import Mixtures, share_slots
from serve.loading.streaming.reader import WeightReader
from serve.loading.streaming.source import slot_layer
from serve.loading.streaming.units import EXPERT, MixtureUse, Use
from serve.models.loaded_tensors import LoadedTensors
from serve.models.packed_cache.layout import Entry
from serve.models.packed_cache.region import huge_pages


class DiskExperts:
    """The ExpertsOp of a mixture, which has slots when the model is whole."""

    def __init__(self) -> None:
        self.found: StreamedExperts | None = None

    def __call__(self, x: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
        assert self.found is not None, "the model is whole"
        return self.found(x, routing, residual)


class ExpertsOnDisk:
    """Takes the experts of all mixtures on the CPU, one by one, and gives them slots."""

    def __init__(self, file: DiskFile, host: LoadedTensors) -> None:
        """host: loads for the CPU."""
        self._file, self._host = file, host
        self._noted: list[tuple[Use, Fusion]] = []
        self._groups: dict[tuple[object, ...], Group] = {}
        self._ops: dict[int, DiskExperts] = {}  # by layers

    def add(self, layer: int, expert: int, op: LinearOp, fusion: Fusion) -> None:
        """Writes a product of an expert, up before down. ConfigError."""
        name = f"layer {layer}, expert {expert}"
        entry = self._file.add_layer(name, op)
        self._noted.append((Use(Entry(name, (entry,)), EXPERT, layer, expert), fusion))

    def end(self, layer: int, *, scales_input: bool) -> DiskExperts:
        """Returns what computes the experts that were added. ConfigError if they differ in form."""
        noted, self._noted = self._noted, []
        ups, downs = (tuple(use for use, _ in noted[at::2]) for at in (0, 1))
        mixture = MixtureUse(layer, ups, downs, noted[0][1], noted[1][1], scales_input)
        if not mixture.is_uniform:
            raise ConfigError(
                f"host_weight_bytes: the experts of layer {layer} differ in form, so that they"
                " cannot be read from a file"
            )
        self._groups.setdefault(mixture.signature, Group(0)).add(mixture)
        made = self._ops[layer] = DiskExperts()
        return made

    def open(
        self, reader: WeightReader, slot_bytes: int, top_k: Mapping[int, int]
    ) -> list[ExpertSlots]:
        """Makes at most so many bytes of slots. top_k: by layers."""
        groups = list(self._groups.values())
        for group in groups:
            group.top_k = max(top_k[mixture.layer] for mixture in group.mixtures)
        counts = share_slots([_mixtures(group) for group in groups], slot_bytes)
        return [self._open(*each, reader) for each in zip(groups, counts, strict=True)]

    def _open(self, group: Group, count: int, reader: WeightReader) -> ExpertSlots:
        size, mixture = group.units[0][0].num_bytes, group.mixtures[0]
        memory = huge_pages(size * count)
        memory.zero_()  # K/V is sized by what is free
        own = [memory[slot * size : (slot + 1) * size] for slot in range(count)]
        up, down = mixture.ups[0].layers[0], mixture.downs[0].layers[0]
        op: ExpertsOp = self._host.experts(
            [slot_layer(up, part, mixture.up_fusion) for part in own],
            [slot_layer(down, part[group.down_at :], mixture.down_fusion) for part in own],
            scales_input=mixture.scales_input,
        )
        slots = ExpertSlots(
            group.units,
            [part.data_ptr() for part in own],
            op,
            num_out=down.kind.num_out,
            scales_input=mixture.scales_input,
        )
        slots.reader = reader
        for number, each in enumerate(group.mixtures):
            self._ops[each.layer].found = StreamedExperts(slots, number)
        return slots


def _mixtures(group: Group) -> Mixtures:
    counts = tuple(map(len, group.units))
    return Mixtures(counts, group.top_k, group.units[0][0].num_bytes)
