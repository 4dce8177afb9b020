"""A trained Llama becomes one with ReLU or a mixture, which the engine computes as torch does."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from examples import train_default_model
from examples.default_model import convert
from examples.default_model.convert import as_mixture, read_model
from examples.default_model.export import write_model
from examples.default_model.model import MLP, Llama, Mixture, Shape
from examples.train_default_model import Plan
from serve.config import default_model_path
from serve.engine.llm import LLM
from serve.sampling_params import SamplingParams

SHAPE = Shape(hidden_size=64, intermediate_size=96, num_hidden_layers=2)
PROMPT = [0, 5, 9, 300, 17, 4000, 44, 12]


def small(shape: Shape = SHAPE) -> Llama:
    torch.manual_seed(1)
    model = Llama(shape)
    model.init_weights()
    for name, weight in model.named_parameters():
        if "embed" not in name and weight.ndim == 2:
            weight.data.mul_(8)  # so that MLPs matter
    return model


def write(folder: Path, model: Llama) -> None:
    tokenizer = Tokenizer.from_file(str(default_model_path() / "tokenizer.json"))
    write_model(folder, model, tokenizer)


def engine_logprobs(folder: Path) -> list[float]:
    """Returns the log-probability of each token of the prompt but the first."""
    with LLM(folder, dtype="float32", kv_dtype="float32", kv_cache_bytes=8 << 20) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        (found,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert found.prompt_logprobs is not None
    pairs = zip(PROMPT[1:], found.prompt_logprobs[1:], strict=True)
    return [each[token].logprob for token, each in pairs if each is not None]


@torch.no_grad()
def torch_logprobs(model: Llama) -> list[float]:
    tokens = torch.tensor([PROMPT])
    every = model.logits(model.hidden(tokens))[0, :-1].log_softmax(-1)
    return every.gather(1, tokens[0, 1:, None])[:, 0].tolist()


@pytest.mark.parametrize("kind", ["relu", "mixture"])
def test_engine_computes_what_was_trained(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "dense", small())
    model = read_model(tmp_path / "dense", "relu" if kind == "relu" else "silu")
    if kind == "mixture":
        model = as_mixture(model, num_experts=8, top_k=2)
    write(tmp_path / "other", model)
    model.bfloat16().float()  # as the file is
    expected = torch_logprobs(model)
    assert engine_logprobs(tmp_path / "other") == pytest.approx(expected, abs=1e-3)
    assert expected != pytest.approx(torch_logprobs(small()), abs=1e-2)


def test_slices_of_an_mlp_are_the_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the experts of all slices, each once and equally weighted, a mixture is the MLP."""
    monkeypatch.setattr(convert, "NOISE", 0.0)
    dense = small()
    mixture = as_mixture(dense, num_experts=3, top_k=3)
    for layer in mixture.layers:
        layer.block_sparse_moe.gate.weight.data.zero_()
    assert torch_logprobs(mixture) == pytest.approx(torch_logprobs(dense), abs=1e-4)


@torch.no_grad()
def test_loss_of_balance_is_least_if_all_experts_have_as_many_tokens() -> None:
    torch.manual_seed(2)
    mixture = Mixture(replace(SHAPE, num_local_experts=4, num_experts_per_tok=2))
    rows = torch.randn(1, 512, SHAPE.hidden_size).abs()
    mixture.gate.weight.mul_(0.01)
    mixture(rows - rows.mean())
    assert float(mixture.imbalance) == pytest.approx(1.0, abs=0.05)
    mixture.gate.weight[0] = 1  # all tokens go to the first expert and to one other
    mixture(rows)
    assert float(mixture.imbalance) == pytest.approx(2.0, abs=0.05)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = 1, len(PROMPT)
    return torch.tensor([PROMPT]), torch.zeros(shape, dtype=torch.int), torch.ones(shape)


@torch.no_grad()
def test_loss_of_activations() -> None:
    dense = small(replace(SHAPE, hidden_act="relu"))
    without, with_size = (float(dense.loss(*batch(), sparse=each)) for each in (0.0, 2.0))
    layers = [part.activations for part in dense.modules() if isinstance(part, MLP)]
    assert [each.shape for each in layers] == [(1, len(PROMPT), SHAPE.intermediate_size)] * 2
    sizes = sum(float(each.abs().mean()) for each in layers)
    assert with_size - without == pytest.approx(2.0 * sizes, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--experts 10 --top-k 5", "--top-k: 5 does not divide the intermediate_size 96 of --st"),
        ("--experts 8 --top-k 3", "--experts: --start is needed, and a multiple of --top-k"),
        ("--experts 8 --top-k 0", "--top-k: at least 1"),
        ("--experts 8 --top-k 2 --sparse 1", "--sparse: activations of experts have no part"),
    ],
)
def test_options_that_do_not_go_together(
    options: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path, small())
    command = f"train --out {tmp_path} --start {tmp_path} {options}"
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit) as raised:
        train_default_model.beginning(train_default_model.parse_args(), Plan())
    assert message in f"{raised.value}" + capsys.readouterr().err


def test_a_mixture_is_not_cut_again(tmp_path: Path) -> None:
    write(tmp_path, as_mixture(small(), num_experts=4, top_k=2))
    args = argparse.Namespace(start=tmp_path, activation=None, experts=4, top_k=2, sparse=0.0)
    with pytest.raises(SystemExit, match="--experts: --start is a mixture already"):
        train_default_model.beginning(args, Plan())
    args.experts, args.sparse = 0, 1.0
    with pytest.raises(SystemExit, match="--sparse: activations of experts"):
        train_default_model.beginning(args, Plan())


def test_routers_are_trained() -> None:
    model = as_mixture(small(), num_experts=4, top_k=2)
    model.loss(*batch()).backward()
    for part in model.modules():
        if isinstance(part, Mixture):
            assert part.gate.weight.grad is not None and part.gate.weight.grad.any()
