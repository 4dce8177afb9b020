"""The small model, or any Llama of its shape, decoded in torch under a K/V policy.

A prompt is read once and can be continued under many policies. Nothing here knows the engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.quality.network import Attention, Layer, Network, angles
from bench.quality.policies import (
    TEMPERATURES,
    WINDOW,
    LayerState,
    Policy,
    gumbel_noise,
    make_policy,
)

ROWS = 256  # queries whose probabilities are in memory at once


@dataclass
class Prompt:
    """A prompt that was read: the K/V of each layer and the logits [vocab] of its last token."""

    tokens: list[int]
    layers: list[LayerState]
    logits: Tensor


class Reference:
    """Reads prompts and continues them.

    room: the most tokens behind a prompt. with_noise: prompts can be continued by keyformer. seed:
    of its noise.
    """

    def __init__(
        self, network: Network, *, room: int = 512, with_noise: bool = True, seed: int = 0
    ) -> None:
        self.network = network
        self.room = room
        self._seed = seed if with_noise else None
        self._noise = torch.empty(0)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> Prompt:
        """Reads a prompt with full attention."""
        network = self.network
        x = network.model.embed_tokens(torch.tensor([list(tokens)]))
        cos, sin = angles(network.shape, torch.arange(len(tokens)))
        states = []
        for index, layer in enumerate(network.model.layers):
            assert isinstance(layer, Layer)
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
            state, y = self._attend(index, q[0], k[0], v[0])
            states.append(state)
            x = x + layer.self_attn.o_proj(y.transpose(0, 1).flatten(1))[None]
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = network.logits(network.model.norm(x[0, -1]))
        return Prompt(list(tokens), states, logits)

    def _attend(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[LayerState, Tensor]:
        """Returns a layer's state after a prompt and its output [H, T, D]."""
        kv_heads, length, width = k.shape
        room = length + self.room
        room_of = torch.zeros(kv_heads, room)
        held = torch.zeros(kv_heads, room, dtype=torch.bool)
        held[:, :length] = True
        wide = torch.zeros(kv_heads, room, width)
        last_rows = torch.zeros(kv_heads, WINDOW, room)
        state = LayerState(
            index, wide, wide.clone(), length, held, room_of, room_of.clone(), last_rows
        )
        state.k[:, :length], state.v[:, :length] = k, v
        grouped = q.view(kv_heads, -1, length, width)
        outputs = []
        for start in range(0, length, ROWS):
            end = min(start + ROWS, length)
            logits = grouped[:, :, start:end] @ k[:, None, :end].transpose(-1, -2)
            logits *= width**-0.5
            rows = torch.arange(start, end)
            logits.masked_fill_(torch.arange(end) > rows[:, None], -math.inf)
            probabilities = logits.softmax(-1)
            outputs.append(probabilities @ v[:, None, :end])
            state.all_rows[:, :end] += probabilities.sum((1, 2))
            last = rows[rows >= length - WINDOW]
            state.last_rows[:, last + WINDOW - length, :end] = probabilities[
                :, :, last - start
            ].sum(1)
            if self._seed is not None:
                noisy = (logits + self.noise_of(state)[:, None, None, :end]) / TEMPERATURES[0]
                state.noisy_rows[:, :end] += noisy.softmax(-1).sum((1, 2))
        return state, torch.cat(outputs, 2).flatten(0, 1)

    def noise_of(self, state: LayerState) -> Tensor:
        """Returns the noise of a layer's keys [Hk, capacity]."""
        assert self._seed is not None
        kv_heads, room = state.held.shape
        if self._noise.numel() == 0 or self._noise.shape[2] < room:
            layers = self.network.shape.num_hidden_layers
            self._noise = gumbel_noise(self._seed, layers, kv_heads, room)
        return self._noise[state.index, :, :room]

    def start(self, prompt: Prompt, policy: str, num_answer: int = 0) -> Continuation:
        """Returns a continuation of a prompt under "NAME:budget=AMOUNT" or "full". num_answer: the
        tokens over which keyformer's temperature rises; 0: those for which there is room."""
        made = make_policy(policy, len(prompt.layers))
        layers = [layer.copy() for layer in prompt.layers]
        return Continuation(self, layers, made, prompt.logits, num_answer or self.room)

    def generate(self, prompt: Prompt, policy: str, count: int) -> list[int]:
        """Returns the most likely tokens after a prompt."""
        going = self.start(prompt, policy, count)
        tokens: list[int] = []
        while True:
            tokens.append(int(going.logits.argmax()))
            if len(tokens) == count:
                return tokens
            going.step(tokens[-1])


class Continuation:
    """A sequence that decodes. logits: of the next token. read: keys read by all steps and K/V
    heads so far, and all: those of full attention."""

    def __init__(
        self,
        reference: Reference,
        layers: list[LayerState],
        policy: Policy,
        logits: Tensor,
        num_answer: int,
    ) -> None:
        self.logits = logits
        self.layers = layers
        self.read = self.all = 0
        self._reference = reference
        self._policy = policy
        self._num_answer = num_answer
        self._prompt_length = layers[0].length
        for layer in layers:
            policy.end_prompt(layer)

    @property
    def held(self) -> float:
        """Returns the keys that a layer and head hold, on average."""
        return sum(float(one.held.sum()) / len(one.held) for one in self.layers) / len(self.layers)

    @torch.inference_mode()
    def step(self, token: int) -> Tensor:
        """Computes a token's row and returns the logits of the next one."""
        network = self._reference.network
        position = self.layers[0].length
        cos, sin = angles(network.shape, torch.tensor([position]))
        x = network.model.embed_tokens(torch.tensor([[token]]))
        for layer, state in zip(network.model.layers, self.layers, strict=True):
            assert isinstance(layer, Layer)
            y = self._attend(layer.self_attn, layer.input_layernorm(x), cos, sin, state)
            x = x + layer.self_attn.o_proj(y.flatten())
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        for state in self.layers:
            self._policy.end_step(state)
        self.logits = network.logits(network.model.norm(x[0, 0]))
        return self.logits

    def _attend(
        self, attention: Attention, x: Tensor, cos: Tensor, sin: Tensor, state: LayerState
    ) -> Tensor:
        q, k, v = (part[0, :, 0] for part in attention.project(x, cos, sin))
        at, kv_heads = state.length, len(k)
        state.k[:, at], state.v[:, at], state.held[:, at] = k, v, True
        state.length = length = at + 1
        chosen = self._policy.read(state, q)
        self.read += int(chosen.sum())
        self.all += chosen.numel()
        grouped = q.view(kv_heads, -1, q.shape[-1])
        logits = grouped @ state.k[:, :length].transpose(-1, -2) * q.shape[-1] ** -0.5
        logits = logits.masked_fill(~chosen[:, None], -math.inf)
        probabilities = logits.softmax(-1)
        state.all_rows[:, :length] += probabilities.sum(1)
        if self._policy.uses_noise:
            first, last = TEMPERATURES
            decoded = at - self._prompt_length + 1
            heat = first + (last - first) * min(1.0, decoded / self._num_answer)
            noise = self._reference.noise_of(state)[:, None, :length]
            state.noisy_rows[:, :length] += ((logits + noise) / heat).softmax(-1).sum(1)
        y: Tensor = probabilities @ state.v[:, :length]
        return y
