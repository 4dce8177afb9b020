"""An exported graph without what does nothing, and what each of its values depends on.

Values that depend on weights alone are constants, computed once. Those that depend on positions
(and the number of rows) alone are computed in each step, by each stage. All others belong to rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from serve.converter import interface
from serve.converter.capture import Captured
from serve.converter.interface import unsupported

CONSTANT, POSITIONS, ROWS = "constant", "positions", "rows"
# operators that return their first argument if type and shape stay as they are
_ALIASES = frozenset(
    {
        *("alias", "contiguous", "detach", "dropout", "expand", "lift_fresh_copy", "reshape"),
        *("slice", "to", "type_as", "view"),
    }
)
_LINEAR, _EMBEDDING = torch.ops.aten.linear.default, torch.ops.aten.embedding.default


@dataclass(slots=True, eq=False, repr=False)  # text with the inputs of inputs would have no end
class Value:
    """An input, a tensor of the checkpoint or the result of an operator.

    number: orders values so that each comes after those it depends on. target: the operator; None
    for inputs and tensors. args, kwargs: with values in place of the graph's nodes. shape: that of
    a tensor, -1 for the number of rows; None for other results. row_bytes: of a tensor, for one
    row. tensor: the name of a parameter or buffer.
    """

    number: int
    name: str
    kind: str
    target: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    inputs: tuple[Value, ...] = ()
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    row_bytes: int | None = None
    tensor: str = ""

    @property
    def is_attention(self) -> bool:
        return self.target is interface.OPERATOR

    @property
    def is_product(self) -> bool:
        """Whether it is a linear layer of the model, whose weights are parameters."""
        return self.target is _LINEAR and all(each.tensor for each in self.inputs[1:])

    @property
    def is_lookup(self) -> bool:
        """Whether it looks rows of a parameter up."""
        return self.target is _EMBEDDING and bool(self.inputs[0].tensor)


@dataclass(slots=True)
class Graph:
    """values: all that the logits need, in order. ids, positions, num_rows: inputs; num_rows is
    the number of rows. hidden: the input of the last product. logits: the result."""

    values: list[Value]
    ids: Value
    positions: Value
    num_rows: Value
    hidden: Value
    logits: Value

    @property
    def attentions(self) -> list[Value]:
        return [value for value in self.values if value.is_attention]


class _Reader:
    """Reads an exported graph node by node."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._values: list[Value] = []
        self._of: dict[fx.Node, Value] = {}
        self._known: dict[Any, Value] = {}  # by operator and arguments
        self._symbol = _symbol_of(captured)
        self.num_rows = self._new("num_rows", POSITIONS)

    def read(self) -> Graph:
        results: list[Value] = []
        for node in self._captured.graph.nodes:
            if node.op == "placeholder":
                self._of[node] = self._input(node)
            elif node.op == "output":
                results = [self._of[x] for x in node.all_input_nodes]
            elif node.op != "call_function" or isinstance(
                node.target, torch._ops.HigherOrderOperator
            ):
                raise unsupported(f"control flow or a nested graph ({node.target})")
            elif not _is_check(node):
                self._of[node] = self._operator(node)
        named = {node.name: value for node, value in self._of.items() if node.op == "placeholder"}
        logits, captured = results[0], self._captured
        values = list(ancestors([logits]))
        for value in values:
            if _joins_rows(value):
                raise unsupported(f"a value of the positions of all rows ({value.target})")
        return Graph(
            values=values,
            ids=named[captured.ids],
            positions=named[captured.positions],
            num_rows=self.num_rows,
            hidden=_hidden(logits, captured.head),
            logits=logits,
        )

    def _new(self, name: str, kind: str, node: fx.Node | None = None, **fields: Any) -> Value:
        value = Value(len(self._values), name, kind, **fields)
        found = None if node is None else node.meta.get("val")
        if isinstance(found, Tensor):
            value.shape = tuple(self._size(dim) for dim in found.shape)
            value.dtype = found.dtype
            value.row_bytes = prod(abs(dim) for dim in value.shape) * found.element_size()
        self._values.append(value)
        return value

    def _is_same(self, value: Value, result: Any) -> bool:
        """Returns whether a result has type and shape of a value."""
        if not isinstance(result, Tensor) or result.dtype != value.dtype:
            return False
        shape = tuple(self._size(dim) for dim in result.shape)
        return shape == value.shape and all(dim >= -1 for dim in shape)

    def _size(self, dim: Any) -> int:
        """Returns a dimension's size: -1 for the number of rows, less for what depends on it in
        another way."""
        if isinstance(dim, int):
            return dim
        if dim.node.expr == self._symbol:
            return -1
        return -2 - abs(int(dim.node.expr.subs(self._symbol, 1)))

    def _input(self, node: fx.Node) -> Value:
        tensor = self._captured.tensors.get(node.name)
        if tensor is None:
            kind = POSITIONS if node.name == self._captured.positions else ROWS
            return self._new(node.name, kind, node)
        return self._new(tensor, CONSTANT, node, tensor=tensor)

    def _operator(self, node: fx.Node) -> Value:
        found = node.meta.get("val")
        if isinstance(found, torch.SymInt) and found.node.expr == self._symbol:
            return self.num_rows
        inputs: list[Value] = []

        def valued(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                inputs.append(self._of[argument])
                return inputs[-1]
            if isinstance(argument, list | tuple):
                return [valued(item) for item in argument]
            return argument

        args = tuple(valued(argument) for argument in node.args)
        kwargs = {name: valued(argument) for name, argument in node.kwargs.items()}
        target: Any = node.target
        if any(isinstance(x, Value) for x in kwargs.values()):
            raise unsupported(f"the operator {target} with a keyword that is computed")
        if _name(target) in _ALIASES and inputs and self._is_same(inputs[0], found):
            return inputs[0]
        key = target, _frozen(args), _frozen(kwargs)
        if target is not interface.OPERATOR and key in self._known:
            return self._known[key]
        value = self._new(
            node.name,
            ROWS if target is interface.OPERATOR else _kind(inputs),
            node,
            target=target,
            args=args,
            kwargs=kwargs,
            inputs=tuple(dict.fromkeys(inputs)),
        )
        self._known[key] = value
        return value


def read_graph(captured: Captured) -> Graph:
    """Reads an exported graph. ModelLoadError if it has no attention, or control flow."""
    graph = _Reader(captured).read()
    if not graph.attentions:
        raise unsupported(f"the attention interface, which {captured.class_name} does not use")
    return graph


def ancestors(values: list[Value]) -> Iterator[Value]:
    """Yields the values and all that they depend on, in order."""
    found, open_ = set(values), list(values)
    while open_:
        for each in open_.pop().inputs:
            if each not in found:
                found.add(each)
                open_.append(each)
    yield from sorted(found, key=lambda value: value.number)


def _hidden(logits: Value, head: str) -> Value:
    """Returns the input of the last product. ModelLoadError if the logits need other rows'
    values, too."""
    needed = list(ancestors([logits]))
    heads = [v for v in needed if v.is_product and v.inputs[1].tensor == head]
    if len(heads) != 1:
        raise unsupported(f"a last product of another form ({head})")
    hidden: Value = heads[0].inputs[0]
    before = set(ancestors([hidden]))
    for value in needed:
        others = {x for x in value.inputs if x.kind == ROWS and x in before} - {hidden}
        if others and value not in before:
            raise unsupported(f"logits that depend on more than the hidden state ({value.name})")
    return hidden


def _symbol_of(captured: Captured) -> Any:
    """Returns the symbol of the number of rows. ModelLoadError if it became a fixed number."""
    for node in captured.graph.nodes:
        if node.name == captured.ids:
            rows = node.meta["val"].shape[1]
            if isinstance(rows, torch.SymInt):
                return rows.node.expr
    raise unsupported(f"a fixed number of rows ({captured.class_name})")


def _joins_rows(value: Value) -> bool:
    """Returns whether a result without rows depends on positions of all rows. What depends on
    their tokens, such as the number of rows of an expert, is left to a trial."""
    if value.kind != POSITIONS or value.shape is None or any(dim < 0 for dim in value.shape):
        return False
    return any(x.shape is not None and any(dim < 0 for dim in x.shape) for x in value.inputs)


def _kind(inputs: list[Value]) -> str:
    kinds = {value.kind for value in inputs}
    return ROWS if ROWS in kinds else POSITIONS if POSITIONS in kinds else CONSTANT


def _is_check(node: fx.Node) -> bool:
    """Returns whether a node only checks something that the export assumed."""
    return not node.users and _name(node.target).startswith(("_assert", "sym_constrain"))


def _name(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    schema = getattr(target, "_schema", None)
    return str(schema.name).rpartition("::")[2] if schema is not None else str(target)


def _frozen(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return tuple(_frozen(item) for item in argument)
    if isinstance(argument, dict):
        return tuple(sorted((name, _frozen(item)) for name, item in argument.items()))
    # 1, 1.0 and True are equal, but not the same argument
    return (type(argument), argument) if isinstance(argument, int | float) else argument
