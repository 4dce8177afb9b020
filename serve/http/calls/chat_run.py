"""One conversation that the engine answers, and its answer in parts, for all APIs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Self

from serve.chat.answer_plan import AnswerPlan
from serve.chat.answer_reader import AnswerReader, ChatStep
from serve.chat.request import ChatRequest
from serve.http.calls.context import Call
from serve.http.calls.continuation import Journal
from serve.http.calls.generation import Generation
from serve.parameter_checks import parameters_named
from serve.request import Prediction, TokenDelta
from serve.text.chat_parser import Part, Text


class ChatRun:
    """The engine's work on one ChatRequest. Use it in a `with` block, whose end aborts what still
    runs."""

    def __init__(self, call: Call, asked: ChatRequest) -> None:
        """Submits the request. Raises OverloadedError, EngineStoppedError, and RequestError for
        tools or a template that the model does not support."""
        engine = self._engine = call.engine
        self._plan = plan = AnswerPlan(
            asked,
            engine.chat_format,
            template=engine.tokenizer.chat_template or "",
            bounded_json=engine.config.bounded_json,
            reasoning_budget=engine.config.reasoning_budget,
        )
        engine.check_grammar_queue(plan.params)
        self._stream = engine.submit_chat(
            asked.messages,
            plan.params,
            request_id=call.request_id,
            client=asked.client,
            policy=call.policy,
            tools=plan.tools,
            template_kwargs=plan.template_kwargs,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
        )
        self.generation = Generation([self._stream], asked.params.n, call.charge, call.policy)
        self._readers: list[AnswerReader] = []
        self._journal = call.policy.journal
        self._continuation = call.policy.continuation

    def __enter__(self) -> Self:
        self.generation.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.generation.__exit__(kind, error, traceback)

    async def accepted(self) -> None:
        """Waits until the prompt is rendered, tokenized and checked. Raises the error of a refused
        one."""
        with parameters_named({"structured": "tools"} if self._plan.structured_by_tools else {}):
            await self.generation.accepted()
        if self._plan.is_read:
            request = await self._stream.accepted()
            self._readers = self._plan.readers(self._engine.tokenizer, request.prompt_token_ids)

    @property
    def prompt_tokens(self) -> int:
        return self.generation.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self.generation.cached_tokens

    @property
    def prediction(self) -> Prediction | None:
        return self.generation.requests[0].prediction

    @property
    def reasoning_tokens(self) -> int:
        """The tokens of reasoning of all choices up to now."""
        return sum(reader.reasoning_tokens for reader in self._readers)

    async def steps(self) -> AsyncGenerator[ChatStep, None]:
        """Yields the steps in order of arrival. Raises for sequences that have failed."""
        readers, journal = self._readers, self._journal
        async with aclosing(self.generation.deltas()) as deltas:
            async for choice, delta in deltas:
                if readers:
                    step = readers[choice].read(choice, delta)
                    if journal is not None:
                        self._note_reasoning(journal, choice, delta)
                        step = journal.named(step)
                    yield step
                    continue
                parts: list[Part] = [Text(delta.text)] if delta.text else []
                reason = delta.finish_reason
                yield ChatStep(choice, delta, parts, None if reason is None else reason.value)

    def _note_reasoning(self, journal: Journal, choice: int, delta: TokenDelta) -> None:
        """Tells the journal how many tokens are reasoning. Of tokens from before, the server that
        made them has counted them; here they could only be estimated."""
        reader, begun = self._readers[choice], self._continuation
        if delta.is_replayed and begun is not None:
            known = begun.reasoning_tokens[choice : choice + 1]
            if known and known[0] is not None:
                reader.reasoning_tokens = known[0]
        journal.note_reasoning(choice, reader.reasoning_tokens)
