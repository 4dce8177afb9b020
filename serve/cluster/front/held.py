"""Where the K/V of an answer lies that goes on after its server is gone, and what it saves there.

Three servers may have some of it: the peer that has copied the pages of the stream, which the
stream's own server has named while it ran; the server that computed the prompt, if another one
decoded; and those that have answered the same beginning of a prompt. All others pull it, or compute
it again.
"""

from __future__ import annotations

from typing import NamedTuple

from serve.cluster.front.apart import ServerLoad


class Held(NamedTuple):
    """Of a stream that goes on. num_tokens: of its prompt and its answer. copied_by: the id of the
    engine that has copied its pages, "" if none has, and num_copied: of how many tokens. prompt_at:
    the URL of the server that computed the prompt for another one, "" if there was none."""

    num_tokens: int
    num_prompt: int
    copied_by: str = ""
    num_copied: int = 0
    prompt_at: str = ""

    def at(self, load: ServerLoad, url: str) -> int:
        """Returns how many of the tokens a server has, as far as it is known."""
        copied = self.num_copied if self.copied_by and load.engine == self.copied_by else 0
        return max(copied, self.num_prompt if url == self.prompt_at else 0)


def rest_s(load: ServerLoad, num_tokens: float, own: float, elsewhere: float) -> float:
    """Returns the seconds until a server goes on with num_tokens tokens, of which it has the first
    `own`, and can pull the first `elsewhere`."""
    computed_s = load.prefill_s(num_tokens) - load.prefill_s(own)
    pulled_s = computed_s
    if elsewhere > own:
        pulled_s = load.pull_s(elsewhere) - load.pull_s(own)
        pulled_s += load.prefill_s(num_tokens) - load.prefill_s(elsewhere)
    return max(0.0, min(computed_s, pulled_s)) * (load.slowdown if load.num_streams else 1.0)
