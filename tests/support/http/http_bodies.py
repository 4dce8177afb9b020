"""Minimal valid bodies of completions and chat."""

from __future__ import annotations

from typing import Any

USER = {"role": "user", "content": "hi"}

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}

CHAT: dict[str, Any] = {"model": "m", "messages": [USER]}
