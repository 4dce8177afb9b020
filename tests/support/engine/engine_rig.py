"""An engine on a scripted device."""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace

from bench.common.instant import load_instant
from serve import Engine, SamplingParams
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.fakes import ScriptedRunner

PROMPT = [5, 6, 7]


def text_script(text):
    """A runner script that spells `text` over and over, one byte-token at a time."""

    def script(sequence):
        from serve.text.tokenizer import Tokenizer

        ids = _ids(text, Tokenizer)
        return ids[sequence.num_output_tokens % len(ids)]

    return script


@functools.cache
def _ids(text, tokenizer_class):
    tokenizer = tokenizer_class.load(checkpoint("llama"))
    return tokenizer.encode(text, add_special_tokens=False)


class Rig:
    """An engine on a ScriptedRunner, and the runner."""

    def __init__(self, num_pages=256, **kwargs):
        settings = {
            k: kwargs.pop(k) for k in list(kwargs) if k.startswith(("max_", "kv_", "memory_"))
        }
        self.runner: ScriptedRunner | None = None

        def make(kv):
            self.runner = ScriptedRunner(kv, **kwargs)
            return self.runner

        load = functools.partial(
            load_instant, make_runner=make, num_pages=num_pages, token_bytes=4096
        )
        self.engine = Engine(
            str(checkpoint("llama")), load=load, **({"max_num_seqs": 8} | settings)
        )

    def sink(self):
        """Returns a sink that ignores what it gets."""
        return SimpleNamespace(
            accept=lambda request: None,
            push=lambda delta: None,
            fail=lambda error: None,
            wake=lambda: None,
        )

    async def __aenter__(self):
        await self.engine.start()
        return self

    async def __aexit__(self, *exc):
        await self.engine.shutdown()
        core = self.engine.loaded.core
        assert core.num_unfinished() == 0
        assert core.stats().pages_in_use == 0
        assert core.stats().pages_mapped == 0
        assert core._inbox.empty()
        assert core._output._records.empty()
        assert self.runner.is_closed
        assert not core._compute.is_alive()
        assert not core._output.is_alive()


def go(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def params(**kwargs):
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | kwargs))
