"""The official clients of both APIs, connected to a test's server."""

from __future__ import annotations

import anthropic
import openai

from tests.support.http.running_server import ServerThread


def openai_client(server: ServerThread) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def anthropic_client(server: ServerThread) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)
