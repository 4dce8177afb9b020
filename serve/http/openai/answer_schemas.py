"""JSON Schemas of answers."""

from __future__ import annotations

from serve.http.schema.fields import Schema

STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}


def object_of(fields: dict[str, Schema], *optional: str) -> Schema:
    """Returns the schema of an object that has all fields but the optional ones."""
    required = [name for name in fields if name not in optional]
    return {"type": "object", "properties": fields, "required": required}


def list_of(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


USAGE = object_of(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": object_of({"cached_tokens": COUNT}),
        "completion_tokens_details": object_of(
            {
                "reasoning_tokens": COUNT,
                "accepted_prediction_tokens": COUNT,
                "rejected_prediction_tokens": COUNT,
            },
            "accepted_prediction_tokens",
            "rejected_prediction_tokens",
        ),
    }
)
_TRANSFER: Schema = {"type": "object"}  # for the engine that goes on; routers pass it on as it is
_FINISH_REASON = {"enum": ["stop", "length"]}
_STOP_REASON: Schema = {"type": ["string", "integer", "null"]}
_CANDIDATES: Schema = {
    "type": "object",
    "additionalProperties": object_of({"logprob": NUMBER, "rank": COUNT, "decoded_token": STRING}),
}
_LOGPROBS = object_of(
    {
        "tokens": list_of(STRING),
        "token_logprobs": list_of(or_null(NUMBER)),
        "top_logprobs": list_of(or_null({"type": "object", "additionalProperties": NUMBER})),
        "text_offset": list_of(COUNT),
    }
)
COMPLETION_ANSWER = object_of(
    {
        "id": STRING,
        "object": {"const": "text_completion"},
        "created": COUNT,
        "model": STRING,
        "system_fingerprint": STRING,
        "choices": list_of(
            object_of(
                {
                    "index": COUNT,
                    "text": STRING,
                    "logprobs": or_null(_LOGPROBS),
                    "finish_reason": _FINISH_REASON,
                    "stop_reason": _STOP_REASON,
                    "prompt_logprobs": list_of(or_null(_CANDIDATES)),
                    "token_ids": list_of(COUNT),
                    "prompt_token_ids": list_of(COUNT),
                },
                "prompt_logprobs",
                "token_ids",
                "prompt_token_ids",
            )
        ),
        "usage": USAGE,
        "kv_transfer_params": _TRANSFER,
    },
    "kv_transfer_params",
)
_CHAT_TOKEN: dict[str, Schema] = {
    "token": STRING,
    "logprob": NUMBER,
    "bytes": or_null(list_of({"type": "integer", "minimum": 0, "maximum": 255})),
}
_CHAT_LOGPROBS = object_of(
    {
        "content": or_null(
            list_of(object_of({**_CHAT_TOKEN, "top_logprobs": list_of(object_of(_CHAT_TOKEN))}))
        ),
        "refusal": {"type": "null"},
    }
)
_TOOL_CALL = object_of(
    {
        "id": STRING,
        "type": {"const": "function"},
        "function": object_of({"name": STRING, "arguments": STRING}),
    }
)
CHAT_ANSWER = object_of(
    {
        "id": STRING,
        "object": {"const": "chat.completion"},
        "created": COUNT,
        "model": STRING,
        "system_fingerprint": STRING,
        "choices": list_of(
            object_of(
                {
                    "index": COUNT,
                    "message": object_of(
                        {
                            "role": {"const": "assistant"},
                            "content": or_null(STRING),
                            "refusal": {"type": "null"},
                            "reasoning_content": or_null(STRING),
                            "tool_calls": list_of(_TOOL_CALL),
                        },
                        "reasoning_content",
                        "tool_calls",
                    ),
                    "logprobs": or_null(_CHAT_LOGPROBS),
                    "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
                    "stop_reason": _STOP_REASON,
                    "token_ids": list_of(COUNT),
                },
                "stop_reason",
                "token_ids",
            )
        ),
        "prompt_logprobs": or_null(list_of(or_null(_CANDIDATES))),
        "prompt_token_ids": list_of(COUNT),
        "usage": USAGE,
        "kv_transfer_params": _TRANSFER,
    },
    "prompt_logprobs",
    "prompt_token_ids",
    "kv_transfer_params",
)
MODEL_ANSWER = object_of(
    {
        "id": STRING,
        "object": {"const": "model"},
        "created": COUNT,
        "owned_by": STRING,
        "max_model_len": COUNT,
        "vocab_size": COUNT,
    }
)
MODELS_ANSWER = object_of({"object": {"const": "list"}, "data": list_of(MODEL_ANSWER)})
EMBEDDINGS_ANSWER = object_of(
    {
        "object": {"const": "list"},
        "model": STRING,
        "data": list_of(
            object_of(
                {
                    "object": {"const": "embedding"},
                    "index": COUNT,
                    "embedding": {"anyOf": [list_of(NUMBER), STRING]},
                }
            )
        ),
        "usage": object_of({"prompt_tokens": COUNT, "total_tokens": COUNT}),
    }
)
TOKENIZE_ANSWER = object_of(
    {
        "count": COUNT,
        "max_model_len": COUNT,
        "tokens": list_of(COUNT),
        "token_strs": or_null(list_of(STRING)),
    }
)
_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
TOKENIZER_ANSWER = object_of(
    {
        **dict.fromkeys((*_NAMED_TOKENS, "chat_template"), or_null(STRING)),
        "model_max_length": COUNT,
    },
    *_NAMED_TOKENS[3:],
)
DETOKENIZE_ANSWER = object_of({"prompt": STRING})
STATUS_ANSWER = object_of({"status": STRING})
VERSION_ANSWER = object_of({"version": STRING})
