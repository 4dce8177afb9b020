"""Decoder and loader: equality with Transformers for every variant, and every bad checkpoint."""

from __future__ import annotations

import json
import logging
import shutil
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from memory.attention import AttentionLayer, Rotation, Ticket
from ops import Edges, LinearOp, get_backend
from ops.reference import ReferenceBackend
from serve.errors import ModelLoadError
from serve.models import Decoder, load_model, read_generation_defaults, read_spec
from tests.checkpoints import (
    VARIANTS,
    Json,
    Variant,
    checkpoint,
    edit_json,
    reference_greedy,
    reference_logits,
)


class ListAttention:
    """K and V of one sequence in lists, softmax written out. Checks the order of the seam."""

    def __init__(self, layers: list[AttentionLayer]) -> None:
        self.layers = layers
        self.k = [torch.empty(0, x.num_kv_heads, x.head_dim) for x in layers]
        self.v = [torch.empty(0, x.num_kv_heads, x.head_dim) for x in layers]
        self.calls: list[tuple[str, int]] = []

    def begin(self, layer: int, q: Tensor) -> Ticket:
        self.calls.append(("begin", layer))
        return Ticket(layer, q)

    def finish(self, ticket: Ticket, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
        index, q = ticket
        if rotation is not None:
            k = ReferenceBackend().rotary(k, *rotation)
        self.calls.append(("finish", index))
        layer = self.layers[index]
        assert q.shape[1:] == (layer.num_heads, layer.head_dim)
        assert k.shape == v.shape == (len(q), layer.num_kv_heads, layer.head_dim)
        self.k[index] = torch.cat((self.k[index], k.float()))
        self.v[index] = torch.cat((self.v[index], v.float()))
        group = layer.num_heads // layer.num_kv_heads
        keys = self.k[index].repeat_interleave(group, dim=1)
        values = self.v[index].repeat_interleave(group, dim=1)
        scores = torch.einsum("thd,lhd->htl", q.float(), keys) * layer.scale
        num_keys = len(keys)
        row = torch.arange(num_keys - len(q), num_keys)[:, None]
        key = torch.arange(num_keys)[None]
        visible = key <= row
        if layer.window is not None:
            visible &= key > row - layer.window
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        return torch.einsum("htl,lhd->thd", weights, values).to(q.dtype)


def load(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(path, dtype=dtype, backend=ReferenceBackend())


def run(decoder: Decoder, ids: list[int], chunks: list[int] | None = None) -> Tensor:
    """Logits of all positions, computed in chunks of the given lengths."""
    attention = ListAttention(decoder.attention_layers())
    parts, start = [], 0
    for length in chunks or [len(ids)]:
        part = torch.tensor(ids[start : start + length])
        positions = torch.arange(start, start + length)
        parts.append(decoder.logits(decoder.forward(part, positions, attention)))
        start += length
    assert start == len(ids)
    return torch.cat(parts)


def token_ids(num_tokens: int, vocab_size: int = 300, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (num_tokens,), generator=generator).tolist()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- equality with Transformers


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_logits_equal_transformers(variant: Variant) -> None:
    path = checkpoint(variant.family, variant.name)
    ids = token_ids(60)
    expected = reference_logits(path, ids)
    assert expected.std() > 0.5
    actual = run(load(path), ids)
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_chunks_equal_the_whole(variant: Variant) -> None:
    """Prefill in pieces and token by token; positions, not calls, decide the result."""
    decoder = load(checkpoint(variant.family, variant.name))
    ids = token_ids(24, seed=2)
    torch.testing.assert_close(
        run(decoder, ids, [7, 1, 1, 10, 3, 1, 1]), run(decoder, ids), atol=1e-4, rtol=1e-5
    )


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_greedy_tokens_are_varied(variant: Variant) -> None:
    """Otherwise comparing greedy tokens would prove little."""
    tokens = reference_greedy(checkpoint(variant.family, variant.name), token_ids(6), 16)
    assert len(set(tokens)) >= 5, tokens


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "opt", "gpt2"])
def test_cpu_backend_equals_transformers(family: str) -> None:
    path = checkpoint(family)
    ids = token_ids(40)
    decoder = load_model(path, dtype=torch.float32, backend=get_backend("cpu"))
    torch.testing.assert_close(run(decoder, ids), reference_logits(path, ids), atol=1e-3, rtol=1e-4)


def test_windows_are_not_vacuous(tmp_path: Path) -> None:
    """Without its window the same checkpoint gives other logits."""
    path = copy_of(checkpoint("mistral"), tmp_path)
    ids = token_ids(30)
    before = run(load(path), ids)
    edit_json(path / "config.json", lambda config: config.update(sliding_window=None))
    after = run(load(path), ids)
    torch.testing.assert_close(before[:8], after[:8])
    assert (before[8:] - after[8:]).abs().max() > 0.1


def test_positions_beyond_the_first_table(tmp_path: Path) -> None:
    """The cos/sin table grows; rows of earlier positions stay what they were."""
    path = copy_of(checkpoint("llama"), tmp_path)
    edit_json(path / "config.json", lambda config: config.update(max_position_embeddings=1 << 17))
    decoder = load(path)

    def hidden(position: int) -> Tensor:
        attention = ListAttention(decoder.attention_layers())
        attention.k = [torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(3))] * 2
        attention.v = attention.k
        return decoder.forward(torch.tensor([5]), torch.tensor([position]), attention)

    early = hidden(100)
    late = hidden(100_000)
    assert torch.isfinite(late).all()
    assert not torch.allclose(early, late, atol=1e-3)
    assert torch.equal(early, hidden(100))


def test_empty_step() -> None:
    decoder = load(checkpoint("llama"))
    none = torch.empty(0, dtype=torch.int64)
    hidden = decoder.forward(none, none, ListAttention(decoder.attention_layers()))
    assert hidden.shape == (0, 64)


def test_seam_is_called_begin_then_finish_layer_by_layer() -> None:
    decoder = load(checkpoint("gpt2"))
    attention = ListAttention(decoder.attention_layers())
    decoder.forward(torch.tensor([1, 2]), torch.tensor([0, 1]), attention)
    assert attention.calls == [(call, i) for i in range(3) for call in ("begin", "finish")]


@pytest.mark.parametrize("file_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_half_precision_files(family: str, file_dtype: torch.dtype, tmp_path: Path) -> None:
    """A checkpoint in 16 bits computes in fp32 with the rounded weights, and in bf16 near it."""
    path = copy_of(checkpoint(family), tmp_path)
    edit_tensors(path, lambda tensors: {name: t.to(file_dtype) for name, t in tensors.items()})
    edit_json(path / "config.json", lambda c: c.update(dtype=str(file_dtype).split(".")[1]))
    assert read_spec(path).torch_dtype == str(file_dtype).removeprefix("torch.")
    ids = token_ids(20)
    exact = run(load(path), ids)
    torch.testing.assert_close(exact, reference_logits(path, ids), atol=1e-4, rtol=1e-5)
    half = run(load(path, torch.bfloat16), ids)
    assert half.dtype == torch.float32
    assert (half - exact).abs().mean() < 0.1 * exact.std()


# -- loading


def copy_of(path: Path, directory: Path) -> Path:
    return Path(shutil.copytree(path, directory / "copy"))


def edit_tensors(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(change(tensors), file, metadata={"format": "pt"})


def test_loading_holds_one_product_at_a_time() -> None:
    """When a product is packed, all earlier unpacked ones are gone."""
    alive: list[weakref.ref[Tensor]] = []
    shapes: list[tuple[int, ...]] = []

    def make_linear(parts: Sequence[Tensor], bias: Tensor | None, edges: Edges) -> LinearOp:
        assert all(part.dtype == torch.bfloat16 for part in parts)
        assert all(item() is None for item in alive)
        alive.extend(weakref.ref(part) for part in parts)
        shapes.append((sum(len(part) for part in parts), parts[0].shape[1]))
        return lambda x, residual=None: x

    load_model(
        checkpoint("llama", "sharded"),
        dtype=torch.bfloat16,
        backend=ReferenceBackend(),
        make_linear=make_linear,
    )
    layer = [(128, 64), (64, 64), (192, 64), (64, 96)]
    assert shapes == [*layer, *layer, *layer, (320, 64)]


def test_sharded_checkpoint_has_several_files() -> None:
    assert len(list(checkpoint("llama", "sharded").glob("*.safetensors"))) > 2


def test_progress_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    load_model(checkpoint("llama"), dtype=torch.float32, backend=ReferenceBackend(), progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "llama" in err


def test_tied_model_with_its_own_head_uses_it(tmp_path: Path) -> None:
    path = copy_of(checkpoint("llama", "tied"), tmp_path)
    embed = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(path, lambda tensors: tensors | {"lm_head.weight": embed.flip(0).contiguous()})
    ids = token_ids(10)
    torch.testing.assert_close(
        run(load(path), ids), reference_logits(path, ids), atol=1e-4, rtol=1e-5
    )


def test_unused_tensors_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = copy_of(checkpoint("gpt2"), tmp_path)
    extra = {"transformer.h.0.attn.bias": torch.ones(1), "stray": torch.ones(1)}
    edit_tensors(path, lambda tensors: tensors | extra)
    with caplog.at_level(logging.WARNING):
        load(path)
    assert "1 tensors are not used, such as stray" in caplog.text


def test_huggingface_cache_links_are_followed(tmp_path: Path) -> None:
    """A snapshot's files are links to ../../blobs."""
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(checkpoint("llama").iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    assert load(snapshot).spec.model_type == "llama"


def test_spec_of_each_family() -> None:
    spec = read_spec(checkpoint("mistral"))
    assert (spec.model_type, spec.torch_dtype) == ("mistral", "float32")
    assert (spec.eos_token_ids, spec.bos_token_id) == ((1,), 0)
    assert spec.attention_layers == [AttentionLayer(4, 2, 16, 16**-0.5, 8)] * 2
    assert read_spec(checkpoint("qwen2", "old-window")).windows == (None, 8, 8)
    assert read_spec(checkpoint("gpt2", "scaled")).scales[2] == pytest.approx(12**-0.5 / 3)
    assert read_spec(checkpoint("llama", "yarn")).max_model_len == 256
    assert read_spec(checkpoint("opt", "350m")).embed_size == 24


def test_generation_defaults(tmp_path: Path) -> None:
    path = copy_of(checkpoint("llama"), tmp_path)
    generation = {"eos_token_id": [7, 9, 7], "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    (path / "generation_config.json").write_text(json.dumps(generation))
    assert read_generation_defaults(path) == {
        "eos_token_ids": (7, 9),
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
    }
    assert read_spec(path).eos_token_ids == (7, 9)
    (path / "generation_config.json").write_text("{}")
    assert read_generation_defaults(path) == {"eos_token_ids": (1,)}
    (path / "generation_config.json").unlink()
    edit_json(path / "config.json", lambda config: config.update(eos_token_id=[3, 4]))
    assert read_generation_defaults(path) == {"eos_token_ids": (3, 4)}


# -- bad checkpoints: each is refused with a message that names what is wrong


def refused(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    return str(caught.value)


CONFIG_ERRORS: list[tuple[str, Json, str]] = [
    ("llama", {"model_type": "rwkv"}, "model_type 'rwkv' is not supported"),
    ("llama", {"model_type": None}, "model_type is missing"),
    ("llama", {"auto_map": {"AutoModel": "evil.Model"}}, "auto_map"),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ("llama", {"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ("llama", {"hidden_size": -1}, "hidden_size is -1"),
    ("llama", {"hidden_size": 0}, "hidden_size is 0"),
    ("llama", {"hidden_size": 10**9}, "hidden_size is 1000000000"),
    ("llama", {"hidden_size": "64"}, "hidden_size must be an integer"),
    ("llama", {"hidden_size": True}, "hidden_size must be an integer"),
    ("llama", {"hidden_size": None}, "hidden_size is missing"),
    ("llama", {"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
    ("llama", {"num_hidden_layers": 3}, "model.layers.2"),
    ("llama", {"num_attention_heads": 5, "head_dim": None}, "does not divide hidden_size"),
    ("llama", {"num_key_value_heads": 3}, "cannot be divided"),
    ("llama", {"head_dim": 15}, "head_dim is 15"),
    ("llama", {"head_dim": 32}, "self_attn.q_proj.weight has shape"),
    ("llama", {"vocab_size": 321}, "vocab_size is 321, the table has 320 rows"),
    ("llama", {"intermediate_size": 1e300}, "intermediate_size is 1"),
    ("llama", {"rms_norm_eps": -1}, "rms_norm_eps"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ("llama", {"hidden_act": "mish"}, "hidden_act 'mish'"),
    ("llama", {"attention_bias": True}, "q_proj.bias is missing"),
    ("llama", {"attention_bias": "yes"}, "attention_bias must be true or false"),
    ("llama", {"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral'"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
    ("llama", {"rope_parameters": [1]}, "rope_parameters"),
    ("llama", {"rope_parameters": {"full_attention": {}}}, "rope_parameters"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama", {"max_position_embeddings": 0}, "max_position_embeddings"),
    ("llama", {"eos_token_id": "</s>"}, "eos_token_id"),
    ("llama", {"bos_token_id": -1}, "bos_token_id"),
    ("qwen2", {"use_sliding_window": True, "layer_types": ["conv"] * 2}, "'conv'"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "sliding_window is missing"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types must list 2"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ("gpt2", {"n_positions": 100}, "transformer.wpe.weight has shape"),
    ("opt", {"word_embed_proj_dim": 24}, "embed_tokens.weight has shape"),
]


@pytest.mark.parametrize(("family", "change", "message"), CONFIG_ERRORS)
def test_bad_config(family: str, change: Json, message: str, tmp_path: Path) -> None:
    path = copy_of(checkpoint(family), tmp_path)
    (path / "generation_config.json").unlink()
    edit_json(path / "config.json", lambda config: config.update(change))
    assert message in refused(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": ' * 100_000, "\udcff"])
def test_config_that_is_not_an_object(text: str, tmp_path: Path) -> None:
    path = copy_of(checkpoint("llama"), tmp_path)
    (path / "config.json").write_bytes(text.encode("utf-8", errors="surrogateescape"))
    assert "config.json" in refused(path)


def test_missing_directory_and_files(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere")
    file = tmp_path / "file"
    file.write_text("")
    assert "not a directory" in refused(file)
    path = copy_of(checkpoint("llama"), tmp_path)
    (path / "model.safetensors").unlink()
    assert "has no weights" in refused(path)
    (path / "pytorch_model.bin").write_bytes(b"never opened")
    message = refused(path)
    assert "pytorch_model.bin" in message
    assert "safetensors" in message
    for name in ("a", "b"):
        save_file({name: torch.ones(1)}, path / f"{name}.safetensors")
    assert "several" in refused(path)
    (path / "config.json").unlink()
    assert "config.json" in refused(path)


def header(text: bytes, length: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ONE = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
BAD_FILES = {
    "seven bytes": b"1234567",
    "empty": b"",
    "header of length 0": header(b"", 0),
    "header beyond the file": header(ONE, 10_000, b"1234"),
    "header of 200 MB": header(ONE, 200 << 20, b"1234"),
    "header of 2^63": header(ONE, 1 << 63, b"1234"),
    "not json": header(b"xxxxxxxx"),
    "not utf-8": header(b'{"\xff\xfe":1}'),
    "data is short": header(ONE, None, b"12"),
    "data is long": header(ONE, None, b"12345678"),
    "end before begin": header(ONE.replace(b"[0,4]", b"[4,0]"), None, b"1234"),
    "negative": header(ONE.replace(b"[0,4]", b"[-4,0]"), None, b"1234"),
    "overflow": header(ONE.replace(b"[1]", b"[4194305,4194305,4194305]"), None, b"1234"),
}


@pytest.mark.parametrize("data", BAD_FILES.values(), ids=BAD_FILES)
def test_bad_safetensors(data: bytes, tmp_path: Path) -> None:
    path = copy_of(checkpoint("llama"), tmp_path)
    (path / "model.safetensors").write_bytes(data)
    assert "model.safetensors cannot be read" in refused(path)


def test_truncated_safetensors(tmp_path: Path) -> None:
    path = copy_of(checkpoint("llama"), tmp_path)
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert "model.safetensors cannot be read" in refused(path)


NORM = "model.layers.1.input_layernorm.weight"
TENSOR_ERRORS: list[tuple[Callable[[Tensor], Tensor] | None, str]] = [
    (None, "is missing"),
    (lambda t: t[:-1].clone(), "has shape [63], but config.json asks for [64]"),
    (lambda t: t[None].clone(), "has shape [1, 64]"),
    (lambda t: t.to(torch.int64), "has type I64"),
    (lambda t: t.fill_(float("nan")), "holds NaN"),
    (lambda t: t.index_fill(0, torch.tensor([63]), float("-inf")), "holds NaN or infinity"),
]


@pytest.mark.parametrize(("change", "message"), TENSOR_ERRORS)
def test_bad_tensor(
    change: Callable[[Tensor], Tensor] | None, message: str, tmp_path: Path
) -> None:
    path = copy_of(checkpoint("llama"), tmp_path)

    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensor = tensors.pop(NORM)
        return tensors if change is None else tensors | {NORM: change(tensor)}

    edit_tensors(path, edit)
    complaint = refused(path)
    assert NORM in complaint
    assert message in complaint


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"x": "../../x.safetensors"}, "not in the directory"),
        ({"x": "/etc/passwd"}, "not in the directory"),
        ({"x": "sub/x.safetensors"}, "not in the directory"),
        ({"x": ".."}, "not in the directory"),
        ({"x": ""}, "does not exist"),
        ({"x": "a\x00b"}, "does not exist"),
        ({"x": "gone.safetensors"}, "does not exist"),
        ({"x": 5}, "names a file 5"),
        ({}, "weight_map"),
        (None, "weight_map"),
        ([1], "weight_map"),
    ],
)
def test_bad_index(weight_map: object, message: str, tmp_path: Path) -> None:
    path = copy_of(checkpoint("llama", "sharded"), tmp_path)
    index = path / "model.safetensors.index.json"
    edit_json(index, lambda values: values.update(weight_map=weight_map))
    assert message in refused(path)


def test_missing_shard_and_shard_twice(tmp_path: Path) -> None:
    path = copy_of(checkpoint("llama", "sharded"), tmp_path)
    first, second, *_ = sorted(path.glob("*.safetensors"))
    shutil.copy(first, second)
    assert "is also in" in refused(path)
    second.unlink()
    assert f"{second.name}, which does not exist" in refused(path)


def test_link_out_of_the_directory(tmp_path: Path) -> None:
    path = copy_of(checkpoint("llama"), tmp_path)
    (path / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (path / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    assert "outside of the model directory" in refused(path)
