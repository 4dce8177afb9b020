"""Settings of small engines that pull K/V from one another: a page has few tokens, so that short
prompts have several pages."""

from __future__ import annotations

from typing import Any

PAGE = 8192
SETTINGS: dict[str, Any] = {
    "kv_page_bytes": PAGE,
    "max_model_len": 250,
    "max_num_seqs": 8,
    "kv_cache_bytes": 8 << 20,
    "max_num_batched_tokens": 64,
}
INT8 = SETTINGS | {"dtype": "int8"}
SERVED = INT8 | {"served_model_name": "m"}
