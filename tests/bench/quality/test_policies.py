"""The policies of the reference against what their rules say, written another way."""

from __future__ import annotations

import math

import pytest
import torch

from bench.quality.network import Network, Shape
from bench.quality.policies import (
    NOISE_BLOCK,
    PAGE,
    POLICIES,
    SINKS,
    SLACK,
    WINDOW,
    Budget,
    gumbel_noise,
    make_policy,
)
from bench.quality.reference import Prompt, Reference
from bench.quality.train import initialize

SHAPE = Shape(num_hidden_layers=3)
PROMPT, MORE = 300, 100
NAMES = [name for name in POLICIES if name != "full"]


@pytest.fixture(scope="module")
def network() -> Network:
    torch.manual_seed(0)
    network = Network(SHAPE)
    initialize(network)
    return network.eval()


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(0, 600, (PROMPT + MORE,)).tolist()


@pytest.fixture(scope="module")
def reference(network: Network) -> Reference:
    return Reference(network, room=MORE)


@pytest.fixture(scope="module")
def prompt(reference: Reference, tokens: list[int]) -> Prompt:
    return reference.read(tokens[:PROMPT])


@torch.inference_mode()
def masked_logits(network: Network, tokens: list[int], seen: torch.Tensor) -> torch.Tensor:
    """The logits of all tokens by whole matrices. seen: [layers, Hk, T, T], what a row reads."""
    from bench.quality.network import Layer, angles

    x = network.model.embed_tokens(torch.tensor([tokens]))
    cos, sin = angles(network.shape, torch.arange(len(tokens)))
    for index, layer in enumerate(network.model.layers):
        assert isinstance(layer, Layer)
        q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        mask = seen[index].repeat_interleave(share, 0)
        scores = (q[0] @ k[0].transpose(-1, -2)) * network.shape.head_dim**-0.5
        y = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v[0]
        x = x + layer.self_attn.o_proj(y.transpose(0, 1).flatten(1))[None]
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return network.logits(network.model.norm(x[0]))


def causal(tokens: list[int]) -> torch.Tensor:
    whole = torch.ones(len(tokens), len(tokens)).tril().bool()
    return whole.repeat(SHAPE.num_hidden_layers, SHAPE.num_key_value_heads, 1, 1)


def test_everything_as_the_budget_has_the_bits_of_full_attention(
    network, reference, prompt, tokens
):
    whole = network.logits(network.hidden(torch.tensor([tokens])))[0]
    full = reference.start(prompt, "full")
    others = [reference.start(prompt, f"{name}:budget=100%") for name in NAMES]
    others += [reference.start(prompt, f"{name}:budget={PROMPT + MORE}") for name in NAMES]
    for position in range(PROMPT, PROMPT + MORE):
        torch.testing.assert_close(full.logits, whole[position - 1], atol=1e-3, rtol=1e-3)
        assert all(bool((other.logits == full.logits).all()) for other in others)
        for one in (full, *others):
            one.step(tokens[position])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_dropped_or_not_read_is_as_if_masked(name, network, reference, prompt, tokens):
    """The rows of a continuation against one pass over the whole text with the same masks."""
    going = reference.start(prompt, f"{name}:budget=20%,least=1")
    seen = causal(tokens)
    found = []
    read = type(going._policy).read
    reads: list[torch.Tensor] = []

    def recorded(layer, q):
        reads.append(read(going._policy, layer, q).clone())
        return reads[-1]

    going._policy.read = recorded  # type: ignore[method-assign]
    for position in range(PROMPT, PROMPT + MORE):
        reads.clear()
        found.append(going.step(tokens[position]))
        for index, chosen in enumerate(reads):
            seen[index, :, position, : position + 1] &= chosen
    expected = masked_logits(network, tokens, seen)[PROMPT:]
    torch.testing.assert_close(torch.stack(found), expected, atol=2e-3, rtol=1e-3)
    whole = masked_logits(network, tokens, causal(tokens))[PROMPT:]
    assert float((expected - whole).abs().max()) > 0.1, "the policy changes nothing here"


@pytest.mark.parametrize("name", ["window", "h2o", "keyformer"])
def test_held_tokens_stay_below_the_budget_and_the_slack(name, reference, prompt, tokens):
    going = reference.start(prompt, f"{name}:budget=50")
    assert going.held == 50
    for position in range(PROMPT, PROMPT + MORE):
        going.step(tokens[position])
        assert all((one.held.sum(1) < 50 + SLACK).all() for one in going.layers)
    assert going.held == 50 + MORE - SLACK


@pytest.mark.parametrize("name", ["snapkv", "pyramid"])
def test_answers_are_kept(name, reference, prompt, tokens):
    going = reference.start(prompt, f"{name}:budget=50")
    for position in range(PROMPT, PROMPT + MORE):
        going.step(tokens[position])
    assert going.held == 50 + MORE


def test_window_keeps_both_ends(reference, prompt):
    going = reference.start(prompt, "window:budget=50")
    ends = [*range(SINKS), *range(PROMPT - 50 + SINKS, PROMPT)]
    for layer in going.layers:
        assert all(head.nonzero().flatten().tolist() == ends for head in layer.held)


def test_h2o_keeps_what_was_looked_at_most(reference, prompt):
    going = reference.start(prompt, "h2o:budget=50")
    for layer, before in zip(going.layers, prompt.layers, strict=True):
        for held, scores in zip(layer.held, before.all_rows, strict=True):
            assert bool(held[PROMPT - 25 : PROMPT].all())
            older = scores[: PROMPT - 25]
            best = sorted(range(len(older)), key=lambda i: -float(older[i]))[:25]
            assert sorted(best) == held[: PROMPT - 25].nonzero().flatten().tolist()


def test_probabilities_sum_to_one_for_each_query_and_head(prompt):
    share = SHAPE.num_attention_heads // SHAPE.num_key_value_heads
    for layer in prompt.layers:
        for sums in (layer.all_rows, layer.noisy_rows):
            torch.testing.assert_close(sums.sum(1), torch.full((2,), float(share * PROMPT)))
        torch.testing.assert_close(layer.last_rows.sum(2), torch.full((2, WINDOW), float(share)))


def test_snapkv_votes_count_for_neighbours(reference, prompt):
    layer = prompt.layers[0].copy()
    layer.last_rows = torch.zeros_like(layer.last_rows)
    layer.last_rows[0, -1, 100] = 1.0
    policy = make_policy("snapkv:budget=40", SHAPE.num_hidden_layers)
    policy.end_prompt(layer)
    newest = 20  # at most half of the budget
    assert bool(layer.held[0, 97:104].all()) and bool(layer.held[0, PROMPT - newest :][:20].all())
    assert int(layer.held[0].sum()) == 40


def test_pyramid_shrinks_from_layer_to_layer(reference, prompt):
    going = reference.start(prompt, "pyramid:budget=60")
    assert [int(layer.held[0].sum()) for layer in going.layers] == [90, 60, 30]


def test_quest_reads_the_pages_with_the_largest_bounds(prompt):
    layer = prompt.layers[1].copy()
    layer.held[:, : layer.length] = True
    q = torch.randn(SHAPE.num_attention_heads, SHAPE.head_dim)
    chosen = make_policy("quest:budget=64", SHAPE.num_hidden_layers).read(layer, q)
    pages = -(-PROMPT // PAGE)
    for head in range(SHAPE.num_key_value_heads):
        bounds = []
        for page in range(pages - 1):
            keys = layer.k[head, page * PAGE : (page + 1) * PAGE]
            low, high = keys.min(0).values, keys.max(0).values
            of_heads = [
                sum(max(float(a * b), float(a * c)) for a, b, c in zip(one, low, high, strict=True))
                for one in q[2 * head : 2 * head + 2]
            ]
            bounds.append(sum(of_heads))
        best = sorted(range(pages - 1), key=lambda page: -bounds[page])[:3]
        read = sorted({int(i) // PAGE for i in chosen[head].nonzero().flatten()})
        assert read == sorted([*best, pages - 1])


def test_a_budget_is_a_number_or_a_share_rounded_up():
    assert [Budget.parse("12%,least=2").of(count) for count in (1, 100, 101)] == [2, 12, 13]
    assert [Budget.parse("12%").of(count) for count in (1, 101, 2000)] == [128, 128, 240]
    assert Budget.parse("64").of(1000) == 64


def test_noise_depends_on_the_seed_and_the_key_alone():
    one, more = gumbel_noise(1, 2, 3, 70), gumbel_noise(1, 2, 3, 4 * NOISE_BLOCK)
    assert bool((one == more[:, :, :70]).all())
    assert not bool((one == gumbel_noise(2, 2, 3, 70)).any())
    assert float(gumbel_noise(0, 4, 4, 4000).mean()) == pytest.approx(0.577, abs=0.02)
