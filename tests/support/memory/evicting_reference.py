"""A slow Llama in torch that drops K/V: one row at a time, every cached key with its position.

It shares no code with the engine's policies but their noise, and nothing with kernels or pages.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as functional
from safetensors.torch import load_file

from memory.policies.eviction import gumbel_noise

SLACK, SINKS, OBSERVED, POOL = 64, 4, 32, 7


class Key:
    """A cached token of one K/V head."""

    def __init__(self, position, k, v):
        self.position, self.k, self.v, self.score = position, k, v, 0.0


class EvictingLlama:
    """Generates greedily. budget(n): the tokens that stay of n."""

    def __init__(self, path, policy, budget, seed=0):
        self.config = json.loads((Path(path) / "config.json").read_text())
        files = sorted(Path(path).glob("*.safetensors"))
        self.weights = {k: v.double() for f in files for k, v in load_file(f).items()}
        self.policy, self.budget, self.seed = policy, budget, seed
        self.layers = self.config["num_hidden_layers"]
        self.heads = self.config["num_attention_heads"]
        self.kv_heads = self.config["num_key_value_heads"]
        self.dim = self.config["head_dim"]

    def generate(self, prompt, num_answer):
        self.num_prompt, self.num_answer = len(prompt), num_answer
        self.cache = [[[] for _ in range(self.kv_heads)] for _ in range(self.layers)]
        self.held = []
        tokens = list(prompt)
        for position in range(len(prompt) + num_answer - 1):
            logits = self.row(tokens[position], position)
            self.held.append(max(len(keys) for layer in self.cache for keys in layer))
            self.drop(position + 1)
            if position + 1 == len(tokens):
                tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :]

    # ---- the model

    def norm(self, x, name):
        eps = self.config["rms_norm_eps"]
        return x * torch.rsqrt(x.pow(2).mean() + eps) * self.weights[name]

    def rotated(self, x, position):
        half = self.dim // 2
        steps = torch.arange(half, dtype=torch.float64) / half
        angles = position * self.config["rope_parameters"]["rope_theta"] ** -steps
        cos, sin = angles.cos(), angles.sin()
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def row(self, token, position):
        w = self.weights
        x = w["model.embed_tokens.weight"][token]
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            h = self.norm(x, at + "input_layernorm.weight")
            parts = [w[f"{at}self_attn.{name}_proj.weight"] @ h for name in "qkv"]
            q, k, v = [part.view(-1, self.dim) for part in parts]
            out = self.attend(layer, self.rotated(q, position), self.rotated(k, position), v)
            x = x + w[at + "self_attn.o_proj.weight"] @ out
            h = self.norm(x, at + "post_attention_layernorm.weight")
            gate, up = (w[f"{at}mlp.{name}_proj.weight"] @ h for name in ("gate", "up"))
            x = x + w[at + "mlp.down_proj.weight"] @ (functional.silu(gate) * up)
        return w["lm_head.weight"] @ self.norm(x, "model.norm.weight")

    def attend(self, layer, q, k, v):
        position = 1 + max((key.position for key in self.cache[layer][0]), default=-1)
        out = []
        for head, keys in enumerate(self.cache[layer]):
            keys.append(Key(position, k[head], v[head]))
            ks, vs = torch.stack([x.k for x in keys]), torch.stack([x.v for x in keys])
            group = self.heads // self.kv_heads
            for query in q[head * group : (head + 1) * group]:
                scores = ks @ query / math.sqrt(self.dim)
                out.append(torch.softmax(scores, 0) @ vs)
                self.add_scores(layer, head, keys, scores, position)
        return torch.cat(out)

    # ---- the policies

    def add_scores(self, layer, head, keys, scores, row):
        if self.policy in ("window",):
            return
        first = self.num_prompt - self.observed(self.budget(self.num_prompt))
        if self.policy in ("snapkv", "pyramid") and not first <= row < self.num_prompt:
            return
        if self.policy == "keyformer":
            last = max(key.position for key in keys) + 1
            noise = gumbel_noise(self.seed, self.layers, self.kv_heads, 0, last)[layer, head]
            scores = scores + torch.tensor([float(noise[key.position]) for key in keys])
            scores = scores / (1 + max(0, row + 1 - self.num_prompt) / self.num_answer)
        for key, weight in zip(keys, torch.softmax(scores, 0), strict=True):
            key.score += float(weight)

    @staticmethod
    def observed(budget):
        return min(OBSERVED, max(1, budget // 2))

    def drop(self, num_tokens):
        budget = self.budget(num_tokens)
        held = len(self.cache[0][0])
        if num_tokens == self.num_prompt:
            if budget >= num_tokens:
                return
        elif (
            num_tokens < self.num_prompt
            or self.policy in ("snapkv", "pyramid")
            or held < budget + SLACK
        ):
            return
        for layer, heads in enumerate(self.cache):
            own = budget
            if self.policy == "pyramid":
                own = budget * (3 * (self.layers - 1) - 2 * layer) // (2 * (self.layers - 1))
            if own < held:
                self.cache[layer] = [self.kept(keys, own) for keys in heads]

    def kept(self, keys, budget):
        if self.policy == "window":
            sinks = min(SINKS, budget // 2)
            return keys[:sinks] + keys[len(keys) - (budget - sinks) :]
        recent = {
            "h2o": budget - budget // 2,
            "keyformer": max(1, round(0.3 * budget)),
            "snapkv": self.observed(budget),
            "pyramid": self.observed(budget),
        }[self.policy]
        others, newest = keys[: len(keys) - recent], keys[len(keys) - recent :]
        scores = [key.score for key in others]
        if self.policy in ("snapkv", "pyramid"):
            reach = POOL // 2
            scores = [max(scores[max(0, i - reach) : i + reach + 1]) for i in range(len(scores))]
        order = sorted(range(len(others)), key=lambda i: (-scores[i], i))
        best = sorted(order[: budget - recent])
        return [others[i] for i in best] + newest
