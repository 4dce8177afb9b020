"""Exports a model class of Transformers as a graph of operators, without any weights.

The class is built on the meta device, so that no memory is taken, and its parameters become
tensors without data. Buffers, such as frequencies of rotary embeddings, are computed.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from serve.converter import interface
from serve.converter.interface import unsupported
from serve.errors import ConfigError, ModelLoadError, reason
from serve.models import FAMILIES
from serve.models.spec import EXPERT_COUNTS, read_config

logger = logging.getLogger(__name__)

_ROWS = 7  # of the example with which a model is exported
_MAX_LAYERS = 1024
_MAX_EXPERTS = 4096


@dataclass(slots=True)
class Captured:
    """An exported model: token ids and positions, both [1, T], to logits.

    tensors: by placeholder of the graph, the parameter or buffer that it stands for. buffers:
    values by name. shapes: of parameters, and of buffers that are saved. ties: a tied parameter and
    the one whose weights it has.
    ids, positions: the placeholders of the inputs. head: the parameter of the last product.
    prefix: of the base model's parameters. config: the class's own, with all defaults. renamed:
    from a checkpoint's name of a tensor to the model's. is_regrouped: Transformers splits or joins
    tensors of checkpoints of this class.
    """

    graph: fx.Graph
    class_name: str
    config: Any
    tensors: dict[str, str]
    buffers: dict[str, Tensor]
    shapes: dict[str, tuple[int, ...]]
    ties: dict[str, str]
    ids: str
    positions: str
    head: str
    prefix: str
    renamed: Callable[[str], str]
    is_regrouped: bool


class _Logits(torch.nn.Module):
    """A model as a function of token ids and positions."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        found = self.model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, return_dict=True
        )
        return found.logits


def capture(path: Path, dtype: torch.dtype) -> Captured:
    """Exports the model of a Hugging Face directory, computing in dtype.

    No code of the directory is run. ModelLoadError names what is not supported; ConfigError if
    Transformers is not installed.
    """
    model_class, config = find_class(path)
    config._attn_implementation = interface.NAME
    interface.register()
    with torch.no_grad():
        model = _without_weights(model_class, config)
        head = _head(model)
        renamed, is_regrouped = _renaming(model)
        saved = model.state_dict()
        ties = dict(getattr(model, "all_tied_weights_keys", {}))
        shapes = {
            name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)
        }
        buffers = dict(model.named_buffers(remove_duplicate=False))
        for name in buffers.keys() & saved.keys():  # they are in checkpoints, as parameters are
            shapes[name] = tuple(buffers.pop(name).shape)
        program = _export(model, dtype)
    tensors, inputs = {}, []
    for spec in program.graph_signature.input_specs:
        name = spec.arg.name
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(name)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            tensors[name] = spec.target.removeprefix("model.")
        else:
            tensors[name] = spec.target
            buffers[spec.target] = program.constants[spec.target]
    return Captured(
        graph=program.graph,
        class_name=model_class.__name__,
        config=config,
        tensors=tensors,
        buffers=buffers,
        shapes=shapes,
        ties=ties,
        ids=inputs[0],
        positions=inputs[1],
        head=head,
        prefix=f"{model.base_model_prefix}.",
        renamed=renamed,
        is_regrouped=is_regrouped,
    )


def find_class(path: Path) -> tuple[Any, Any]:
    """Returns the class of the installed Transformers that config.json names, and its
    configuration. ModelLoadError if there is none that can be converted."""
    reader = read_config(path, is_converted=True)
    source = path / "config.json"
    model_type = reader.text("model_type")
    transformers = _transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    if model_type not in transformers.CONFIG_MAPPING or model_type not in NAMES:
        raise reader.fail(
            "model_type",
            f"{model_type!r} is no causal language model of transformers "
            f"{transformers.__version__}; converter serves only those",
        )
    named, entry = reader.values.get("architectures"), NAMES[model_type]
    known = (entry,) if isinstance(entry, str) else entry
    name = named[0] if isinstance(named, list) and named else known[0]
    if name not in known:
        raise reader.fail("architectures", f"names {name!r}; converter serves {known[0]}")
    if reader.values.get("quantization_config") is not None:
        raise reader.fail("quantization_config", "is not supported by converter")
    reader.integer("num_hidden_layers", 1, high=_MAX_LAYERS)
    for key in EXPERT_COUNTS:
        reader.integer(key, 1, low=0, high=_MAX_EXPERTS)
    model_class = getattr(transformers, name)
    try:
        config = transformers.CONFIG_MAPPING[model_type].from_dict(dict(reader.values))
    except Exception as error:  # any check of the configuration's class
        raise ModelLoadError(f"{source}: transformers refuses it: {_first_line(error)}") from error
    _check(model_class, config, source)
    if model_type in FAMILIES:
        logger.info("converter: %s has a row in the table of families, which is faster", model_type)
    return model_class, config


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            'converter needs transformers: pip install "mergestep[converter]"'
        ) from error
    return transformers


def _check(model_class: Any, config: Any, source: Path) -> None:
    """Refuses by name what an exported graph would not show, or shows only as an odd failure."""
    problems = {
        "an encoder (is_encoder_decoder)": getattr(config, "is_encoder_decoder", False),
        "a state beside K/V": getattr(model_class, "_is_stateful", False),
        "layers that keep a state (layer_types)": _has_states(config),
        "attention within chunks (attention_chunk_size)": getattr(
            config, "attention_chunk_size", None
        ),
        "attention to later tokens (use_bidirectional_attention)": getattr(
            config, "use_bidirectional_attention", None
        ),
        "rotations that follow the longest sequence (rope_type dynamic or longrope)": any(
            kind in ("dynamic", "longrope") for kind in _rope_types(config)
        ),
        "cross attention (add_cross_attention)": getattr(config, "add_cross_attention", False),
        "position_ids, which its forward does not take": "position_ids"
        not in inspect.signature(model_class.forward).parameters,
        "the attention interface, which its class does not use": not getattr(
            model_class, "_supports_attention_backend", False
        )
        and not getattr(model_class, "_supports_sdpa", False),
    }
    for what, is_needed in problems.items():
        if is_needed:
            raise ModelLoadError(f"{source}: {unsupported(what)}")


def _rope_types(config: Any) -> list[object]:
    """Returns the kinds of rotary embeddings, which may differ between kinds of layers."""
    found = getattr(config, "rope_parameters", None)
    if not isinstance(found, dict):
        return []
    return [x.get("rope_type") for x in (found, *found.values()) if isinstance(x, dict)]


def _has_states(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None) or ()
    return any(kind not in ("full_attention", "sliding_attention") for kind in kinds)


def _without_weights(model_class: Any, config: Any) -> Any:
    """Builds the model with parameters on the meta device, and buffers with their values."""
    with _naming(model_class, "cannot be built"):
        with torch.device("meta"):
            model = model_class(config).eval()
        for module in model.modules():
            found = [n for n, b in module.named_buffers(recurse=False) if b.device.type == "meta"]
            for name in found:
                module._buffers[name] = _unset(getattr(module, name))
            if found:
                model._init_weights(module)  # computes the buffers; parameters have no data
            for name in found:
                is_saved = name not in module._non_persistent_buffers_set
                if not is_saved and _is_unset(getattr(module, name)):
                    raise unsupported(f"the buffer {name}, which its class computes in another way")
    return model


def _unset(buffer: Tensor) -> Tensor:
    """Returns a buffer with values that no class would give it."""
    value = torch.nan if buffer.is_floating_point() else -(1 << 30)
    if buffer.dtype not in (torch.int64, torch.int32) and not buffer.is_floating_point():
        raise unsupported(f"a buffer of type {buffer.dtype}")
    return torch.full(buffer.shape, value, dtype=buffer.dtype)


def _is_unset(buffer: Tensor) -> bool:
    return bool((buffer.isnan() | (buffer == -(1 << 30))).any())


def _head(model: Any) -> str:
    """Returns the name of the last product's weight."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head and isinstance(head, torch.nn.Linear):
            return f"{name}.weight"
    raise unsupported(f"a head that is no linear layer ({type(model).__name__})")


def _renaming(model: Any) -> tuple[Callable[[str], str], bool]:
    """Returns how names in checkpoints become the model's, and whether tensors change, too."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    found = get_model_conversion_mapping(model)
    steps = [each for each in found if isinstance(each, WeightRenaming)]

    def renamed(name: str) -> str:
        for step in steps:
            name = step.rename_source_key(name)[0]
        return name

    return renamed, len(steps) < len(found)


def _export(model: Any, dtype: torch.dtype) -> Any:
    """Exports the model over rows [1, T], whose number stays open."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                empty = torch.empty(parameter.shape, dtype=dtype)
                module._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            is_saved = name not in module._non_persistent_buffers_set
            if is_saved and buffer.is_floating_point():
                buffer = buffer.to(dtype)
            module._buffers[name] = mode.from_tensor(buffer, static_shapes=True)
    rows, positions = (torch.zeros(1, _ROWS, dtype=torch.int64) for _ in range(2))
    any_rows = {1: torch.export.Dim.DYNAMIC}
    with (
        _naming(type(model), "cannot be exported for a varying number of rows"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of torch's own modules
        program = torch.export.export(
            _Logits(model).eval(),
            (rows, positions),
            dynamic_shapes=(any_rows, any_rows),
            strict=False,
        )
        if any(_is_in_place(node) for node in program.graph.nodes):
            program = program.run_decompositions({})
    return program


def _is_in_place(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


@contextmanager
def _naming(model_class: Any, what: str) -> Iterator[None]:
    """Turns whatever a model's code raises into a ModelLoadError that names the class."""
    try:
        yield
    except ModelLoadError as error:
        raise ModelLoadError(f"{model_class.__name__}: {error}") from error
    except Exception as error:
        raise ModelLoadError(
            f"converter: {model_class.__name__} {what}: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [reason(error) if isinstance(error, OSError) else ""]
    return f"{type(error).__name__}: {lines[0][:300]}"
