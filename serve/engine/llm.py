"""The offline, synchronous interface: prompts in, finished outputs out, over the same core.

It needs no event loop, so it works in a notebook, in a script and in several threads, next to
other engines.
"""

from __future__ import annotations

import logging
import math
import queue
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

from rich.console import Console
from rich.progress import Progress

from serve.chat.answer_plan import AnswerPlan
from serve.chat.message_parts import MessageParts
from serve.chat.python_chat import ChatOptions
from serve.chat.request import ChatRequest
from serve.config import DEFAULT_MODEL, EngineConfig, EngineSettings
from serve.engine.chat_prompt import encode_chat, make_chat_format
from serve.engine.core import EngineCore
from serve.engine.loader import load_engine
from serve.engine.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    RequestOutput,
    decode_prompt_logprobs,
    embedding_output,
)
from serve.engine.request_table import RequestState
from serve.engine.stats import EngineStats
from serve.errors import RequestError
from serve.hub.find import find
from serve.parameter_checks import parameters_named
from serve.pooling import PoolingParams
from serve.request import FinishReason, Prompt, Request, TokenDelta, TokenLogprobs
from serve.sampling_params import SamplingParams
from serve.single_file.config import with_directory
from serve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]


class _Collector:
    """The Sink of one request. It goes into the queue `done` when all its sequences have ended."""

    def __init__(
        self,
        done: queue.SimpleQueue[_Collector],
        token_text: Callable[[int], str],
        *,
        keeps_deltas: bool = False,
    ) -> None:
        """keeps_deltas: `deltas` has all deltas; else none."""
        self.deltas: list[TokenDelta] = []
        self._keeps_deltas = keeps_deltas
        self.request: Request | None = None
        self.outputs: list[CompletionOutput] = []
        self.error: Exception | None = None
        self.last: TokenDelta | None = None
        self._prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
        self._done = done
        self._token_text = token_text
        self._num_left = 0

    def accept(self, request: Request) -> None:
        self.request = request
        self.outputs = [CompletionOutput(i) for i in range(request.params.n)]
        self._num_left = request.params.n

    def push(self, delta: TokenDelta) -> None:
        self.outputs[delta.index].extend(delta, self._token_text)
        self.last = delta
        if self._keeps_deltas:
            self.deltas.append(delta)
        self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        if delta.finish_reason is not None:
            self._num_left -= 1
            if self._num_left == 0:
                self._done.put(self)

    def fail(self, error: Exception) -> None:
        self.error = error
        self._done.put(self)

    def wake(self) -> None:
        """Does nothing: a request is read when it has ended."""

    def output(self, state: RequestState) -> RequestOutput:
        request, of_prompt = self.request, self._prompt_logprobs
        assert request is not None
        prediction = request.prediction
        return RequestOutput(
            request.request_id,
            request.prompt,
            list(request.prompt_token_ids),
            self.outputs,
            all(o.finish_reason != FinishReason.ABORT.value for o in self.outputs),
            state.metrics(),
            None if of_prompt is None else decode_prompt_logprobs(of_prompt, self._token_text),
            0 if prediction is None else prediction.num_accepted,
            0 if prediction is None else prediction.num_rejected,
        )

    def embedding(self, state: RequestState) -> EmbeddingOutput:
        assert self.request is not None
        return embedding_output(self.request, self.last, state.metrics())


class LLM:
    """A model for batch use: `LLM(path, dtype="auto").generate(prompts, SamplingParams(...))`.

    model: a directory or a GGUF file, or, as a string, the name of a model on the hub
    ("org/name", "org/name:QUANT"), which is fetched unless it is here; None takes the embedded
    model. revision: of a name, a branch, tag or commit. progress: shows bars while a model is
    fetched and weights load. settings: the fields of EngineConfig. Raises ModelLoadError, its
    DownloadError, and ConfigError.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        revision: str | None = None,
        progress: bool = False,
        **settings: Unpack[EngineSettings],
    ) -> None:
        settings.setdefault("inter_token_factor", math.inf)  # callers read whole answers
        if (isinstance(model, str) and model) or revision is not None:
            location = find(
                DEFAULT_MODEL if model is None else str(model),
                revision=revision,
                tell=logger.info,
                is_quiet=not progress,
            )
            model = location.model
            if settings.get("served_model_name") is None:
                settings["served_model_name"] = location.name
        if isinstance(draft := settings.get("draft_model"), str) and draft:
            draft = find(draft, tell=logger.info, is_quiet=not progress).model
            settings["draft_model"] = draft
        self.config = with_directory(EngineConfig.from_settings(model, **settings))
        self._loaded = load_engine(self.config, progress=progress)
        self._chat_format = make_chat_format(self._loaded.tokenizer, self.config)
        self._loaded.core.start()
        self._finalizer = weakref.finalize(self, self._loaded.close)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        return self._loaded.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        client: str | None = None,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts. A prompt is text, a list of token ids or
        {"prompt_token_ids": [...]}. Raises RequestError if one of them cannot be served; the other
        requests are then aborted. use_tqdm: shows a progress bar on a terminal. client: a name for
        the application; lengths of answers are predicted per client."""
        many = _many(prompts)
        params = _params_for(sampling_params, len(many), SamplingParams)
        done = self._run(many, params, use_tqdm, client)
        return [collector.output(state) for collector, state in done]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        client: str | None = None,
    ) -> list[EmbeddingOutput]:
        """Embeddings in the order of the prompts, which are as in `generate`. Raises RequestError
        and GenerationError."""
        many = _many(prompts)
        params = _params_for(pooling_params, len(many), PoolingParams)
        done = self._run(many, params, use_tqdm, client)
        return [collector.embedding(state) for collector, state in done]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        client: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        include_reasoning: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Does what `generate` does for one conversation or a list of them, and reads reasoning and
        tool calls in the answers: see CompletionOutput.

        The arguments after `client` mean what the fields of /v1/chat/completions mean; a bound on
        the reasoning is SamplingParams.thinking_token_budget. add_generation_prompt: None is True
        unless the final message is continued. Raises RequestError that names the argument.
        """
        if self._loaded.template is None:
            raise RequestError("this model has no chat template", param="messages")
        options = ChatOptions(
            tools,
            tool_choice,
            parallel_tool_calls,
            reasoning_effort,
            include_reasoning,
            chat_template_kwargs,
            add_generation_prompt,
            continue_final_message,
        )
        one = bool(messages) and isinstance(messages[0], dict)
        conversations: Any = [messages] if one else messages
        params = _params_for(sampling_params, len(conversations), SamplingParams)
        plans = []
        prompts = []
        for conversation, each in zip(conversations, params, strict=True):
            asked = options.request(conversation, each)
            plans.append(self._plan(asked))
            prompts.append({"prompt_token_ids": self._rendered(asked, plans[-1])})
        by_tools = all(plan.structured_by_tools for plan in plans)
        with parameters_named({"structured": "tools"} if by_tools else {}):
            all_params = [plan.params for plan in plans]
            done = self._run(prompts, all_params, use_tqdm, client, keeps_deltas=True)
        return [
            self._read(collector, state, plan)
            for (collector, state), plan in zip(done, plans, strict=True)
        ]

    def _plan(self, asked: ChatRequest) -> AnswerPlan:
        return AnswerPlan(
            asked,
            self._chat_format,
            template=self.tokenizer.chat_template or "",
            bounded_json=self.config.bounded_json,
            reasoning_budget=self.config.reasoning_budget,
        )

    def _rendered(self, asked: ChatRequest, plan: AnswerPlan) -> list[int]:
        template = self._loaded.template
        assert template is not None
        return encode_chat(
            template,
            self.tokenizer,
            asked.messages,
            self._loaded.limits,
            asked.add_generation_prompt,
            style=self._chat_format,
            tools=plan.tools,
            template_kwargs=plan.template_kwargs,
            continue_final_message=asked.continue_final_message,
        )

    def _read(self, collector: _Collector, state: RequestState, plan: AnswerPlan) -> RequestOutput:
        """Returns the output, with what a plan's readers find in the texts."""
        output = collector.output(state)
        if not plan.is_read:
            for answer in output.outputs:
                answer.content = answer.text
            return output
        readers = plan.readers(self.tokenizer, output.prompt_token_ids)
        said = [MessageParts() for _ in readers]
        for delta in collector.deltas:
            step = readers[delta.index].read(delta.index, delta)
            said[delta.index].extend(step.parts)
            if step.finish_reason is not None:
                output.outputs[delta.index].finish_reason = step.finish_reason
        for answer, reader, parts in zip(output.outputs, readers, said, strict=True):
            answer.content, answer.tool_calls = parts.content, parts.tool_calls
            answer.reasoning = "".join(parts.reasoning) or None
            answer.reasoning_tokens = reader.reasoning_tokens
        return output

    def _run(
        self,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams | PoolingParams],
        show_progress: bool,
        client: str | None,
        *,
        keeps_deltas: bool = False,
    ) -> list[tuple[_Collector, RequestState]]:
        done: queue.SimpleQueue[_Collector] = queue.SimpleQueue()
        token_text = self.tokenizer.token_text
        collectors = [_Collector(done, token_text, keeps_deltas=keeps_deltas) for _ in prompts]
        core = self._loaded.core
        window = self.config.max_num_waiting
        states: list[RequestState] = []
        error: Exception | None = None
        try:
            console = Console(stderr=True)
            is_shown = show_progress and console.is_terminal
            with Progress(console=console, disable=not is_shown, transient=True) as progress:
                task = progress.add_task("generating", total=len(prompts))
                for finished in range(len(prompts)):
                    while error is None and len(states) < min(len(prompts), finished + window):
                        i = len(states)
                        states.append(
                            core.submit(prompts[i], params[i], collectors[i], client=client)
                        )
                    if finished >= len(states):
                        break
                    collector = done.get()
                    progress.advance(task)
                    if collector.error is not None and error is None:
                        error = collector.error
                        _abort_all(core, states)
        except BaseException:  # Ctrl-C or a refusal: no request of this call may go on
            _abort_all(core, states)
            raise
        if error is not None:
            raise error
        return list(zip(collectors, states, strict=True))

    def stats(self) -> EngineStats:
        return self._loaded.core.stats()

    def shutdown(self) -> None:
        """Stops the threads and frees all memory. The end of `with`, garbage collection and the
        interpreter's exit call it too."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()


def _abort_all(core: EngineCore, states: list[RequestState]) -> None:
    for state in states:
        core.abort(state)


_Params = TypeVar("_Params", SamplingParams, PoolingParams)


def _params_for(
    given: _Params | Sequence[_Params] | None, count: int, kind: type[_Params]
) -> list[_Params]:
    if given is None:
        return [kind()] * count
    if isinstance(given, kind):
        return [given] * count
    name = "sampling_params" if kind is SamplingParams else "pooling_params"
    if not isinstance(given, Sequence) or not all(isinstance(each, kind) for each in given):
        raise RequestError(f"{name} must be {kind.__name__}", param=name, code="invalid_type")
    if len(given) != count:
        raise RequestError(f"{len(given)} {name} for {count} prompts", param=name)
    return list(given)


def _many(prompts: Any) -> Sequence[Any]:
    one = isinstance(prompts, (str, dict)) or _is_token_list(prompts)
    return [prompts] if one else prompts


def _is_token_list(prompts: Any) -> bool:
    return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], int)
