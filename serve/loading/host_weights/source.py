"""The source of a model's tensors that puts each where its placement wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ops.backend import NO_FUSION, ExpertsOp, Fusion, HeadsOp, LinearOp
from ops.cpu.native_stored import LayerKind, stored
from ops.linear import SideBySide
from quant.formats.weights import Reordered
from serve.loading.host_weights.disk import DiskFile
from serve.loading.host_weights.disk_experts import ExpertsOnDisk
from serve.loading.host_weights.experts import HostExperts, HostRows
from serve.loading.host_weights.link import Link
from serve.loading.host_weights.needs import is_of_layer
from serve.loading.host_weights.placement import HostPlacement
from serve.loading.host_weights.ring import RingLayer
from serve.loading.streaming.source import NOTHING
from serve.models.loaded_tensors import AroundTensors, LoadedTensors
from serve.models.parts import Part

if TYPE_CHECKING:  # only a CUDA back end has them
    from serve.loading.host_weights.device_form import ProductForm
    from serve.loading.host_weights.expert_memory import ExpertMemory


class PlacedTensors(AroundTensors):
    """A TensorSource over one that loads to the device and one that loads for the CPU. file: for
    what the placement has on the disk."""

    def __init__(
        self,
        device: LoadedTensors,
        host: LoadedTensors,
        placement: HostPlacement,
        link: Link,
        *,
        file: DiskFile | None = None,
        has_room: bool = False,
    ) -> None:
        """has_room: the device can take experts of the CPU, too."""
        super().__init__(device)
        self._file = file
        self.disk_experts: ExpertsOnDisk | None = None
        if placement.slot_bytes is not None:
            assert file is not None, "a placement with experts on the disk"
            self.disk_experts = ExpertsOnDisk(file, host)
        self._has_room = has_room
        self._known: dict[tuple[LayerKind, tuple[int, ...], Fusion], ProductForm] = {}
        self._forms: list[ProductForm | None] = []  # of the first expert's products
        self._host = host
        self._placement, self._link = placement, link
        self._layer = 0
        self._products: list[LinearOp] = []  # of the layer, unless they are combined with others
        self._rows = HostRows(link)
        self.ring_layers: list[RingLayer] = []
        self.experts_on_cpu: dict[int, HostExperts] = {}

    def product(
        self,
        parts: Sequence[Part],
        num_in: int,
        *,
        has_bias: bool = False,
        fusion: Fusion = NO_FUSION,
        scale: float = 1.0,
        is_head: bool = False,
    ) -> LinearOp:
        is_expert = parts[0].expert is not None
        is_on_cpu = is_expert and self._layer in self._placement.on_cpu
        source = self._host if is_on_cpu else self._loaded
        op = source.product(
            parts, num_in, has_bias=has_bias, fusion=fusion, scale=scale, is_head=is_head
        )
        if is_on_cpu and self.disk_experts is not None:
            self.disk_experts.add(self._layer, parts[0].expert or 0, op, fusion)
            return NOTHING
        if is_on_cpu and self._has_room and len(self._forms) < 2:
            make = partial(self._loaded.product, parts, num_in, has_bias=has_bias, fusion=fusion)
            self._forms.append(self._form_of(op, fusion, partial(make, scale=scale)))
        if not is_expert and is_of_layer(parts, self._layer):
            self._products.append(op)
        return op

    def pack(self, weight: Tensor) -> LinearOp:
        op = super().pack(weight)
        self._products.append(op)
        return op

    def experts(
        self, ups: Sequence[LinearOp], downs: Sequence[LinearOp], *, scales_input: bool
    ) -> ExpertsOp:
        if self._layer not in self._placement.on_cpu:
            return super().experts(ups, downs, scales_input=scales_input)
        op: ExpertsOp
        memory = None
        if self.disk_experts is None:
            memory = self._memory_of(ups, downs, scales_input=scales_input)
            if memory is not None:
                ups, downs = memory.ups, memory.downs
            op = self._host.experts(ups, downs, scales_input=scales_input)
        else:
            op = self.disk_experts.end(self._layer, scales_input=scales_input)
        made = HostExperts(op, len(ups), self._rows, scales_input=scales_input)
        made.memory = memory
        self.experts_on_cpu[self._layer] = made
        return made

    def _form_of(
        self, op: LinearOp, fusion: Fusion, make: Callable[[], LinearOp]
    ) -> ProductForm | None:
        """Returns the form of a product of the CPU that `make` makes on the device."""
        from serve.loading.host_weights.device_form import ProductForm

        found = stored(op)
        if found is None:
            return None
        kind, buffers = found
        key = kind, tuple(each.num_bytes for each in buffers), fusion
        if key not in self._known:
            self._known[key] = ProductForm(*key, make())
        form = self._known[key]
        return form if form.is_known else None

    def _memory_of(
        self, ups: Sequence[LinearOp], downs: Sequence[LinearOp], *, scales_input: bool
    ) -> ExpertMemory | None:
        """Returns page-locked memory with experts that the device can compute, too."""
        forms, self._forms = self._forms, []
        if len(forms) < 2 or forms[0] is None or forms[1] is None:
            return None
        from serve.loading.host_weights.expert_memory import ExpertMemory, is_of_form

        if not all(is_of_form(op, forms[0]) for op in ups):
            return None
        if not all(is_of_form(op, forms[1]) for op in downs):
            return None
        both = forms[0], forms[1]
        return ExpertMemory(*both, ups, downs, self._link, scales_input=scales_input)

    def heads(self, ops: Sequence[LinearOp]) -> HeadsOp:
        # their combination has the addresses of the weights, which therefore cannot move
        combined = {id(op) for op in ops}
        self._products = [op for op in self._products if id(op) not in combined]
        return super().heads(ops)

    def end_layer(self) -> None:
        if not self._placement.is_resident[self._layer]:
            tensors = [tensor for op in self._products for tensor in weights_of(op)]
            file = self._file if self._layer in self._placement.on_disk else None
            name = f"layer {self._layer}"
            self.ring_layers.append(RingLayer(tensors, self._link, file, name))
        self._products.clear()
        self._layer += 1
        super().end_layer()

    @property
    def num_ungrouped(self) -> int:
        """The layers whose experts are computed one by one."""
        return self._loaded.num_ungrouped + self._host.num_ungrouped


def weights_of(op: LinearOp) -> list[Tensor]:
    """Returns the weights of a product on a device, which may move; what is small, such as its
    norm, stays where it is."""
    if isinstance(op, SideBySide):
        return [tensor for each in op.ops for tensor in weights_of(each)]
    if isinstance(op, Reordered):
        return weights_of(op.op)
    weight: Tensor | NamedTuple | None = getattr(op, "weight", None)
    if weight is None:
        return []
    every = (weight, getattr(op, "bias", None)) if isinstance(weight, Tensor) else weight
    return [each for each in every if isinstance(each, Tensor)]
