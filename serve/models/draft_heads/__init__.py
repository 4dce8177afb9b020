"""Heads that draft: MTP layers of checkpoints that have them, and EAGLE-3 heads.

A head is one block beside a model. It reads a hidden state that the model has computed for a token,
and the token that follows, and predicts the one after that. Its K/V is a further layer of the
model's. serve/models/layers/draft_head.py computes them; here is how they are described and loaded.
"""
