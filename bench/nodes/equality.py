"""Whether answers over memory nodes are those of local K/V (bench.nodes.memory_nodes).

The built-in model answers greedily, with local K/V and over two nodes. An answer has the same bits
if its tokens and the log-probability of each of them are equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from bench.common.node_processes import memory_nodes
from serve import LLM, SamplingParams

_QUESTIONS = [
    "What is the opposite of hot?",
    "Tell me a story about a dog.",
    "What is your name?",
    "What is the capital of France?",
    "Write a short text about rain.",
    "Who are you?",
    "Tell me a story about a king and a bird.",
    "What is 3 plus 4?",
    "Explain why the sky is blue.",
    "Give me a list of animals.",
    "What can you do?",
    "Tell me a joke.",
    "Write about the sea.",
    "How are you today?",
    "What is the opposite of big?",
    "Tell me a story about a girl who found a stone.",
]
_CASES: dict[str, list[dict[str, Any]]] = {
    "int8": [
        {"memory_partition": "head"},
        {"memory_partition": "request"},
        {"memory_partition": "head", "memory_prefill": "remote"},
        {"memory_partition": "sequence"},
        {"memory_partition": "head", "memory_wire": "int8"},
    ],
    "bfloat16": [{"memory_partition": "head"}],
    "float32": [{"memory_partition": "head"}],
}


def measure_equality(folder: Path, is_quick: bool) -> tuple[Table, dict[str, Any]]:
    """Returns how many answers have the same tokens, and the same bits, and their table."""
    length = 20 if is_quick else 200
    table = Table("numbers", "settings", "answers", "same tokens", "same bits")
    table.title = f"answers of {length} tokens over two nodes (shm), beside local K/V"
    found: dict[str, Any] = {}
    for dtype, cases in _CASES.items():
        local = _answers(length, dtype=dtype)
        for settings in cases:
            with memory_nodes(2, folder) as urls:
                over = {"memory_nodes": tuple(urls), "memory_node_key_file": folder / "key"}
                remote = _answers(length, dtype=dtype, **over, **settings)
            pairs = list(zip(local, remote, strict=True))
            tokens = sum([one == other for (one, _), (other, _) in pairs])
            bits = sum([one == other for one, other in pairs])
            name = ", ".join(f"{key.removeprefix('memory_')} {settings[key]}" for key in settings)
            found[f"{dtype}: {name}"] = {"tokens": tokens, "bits": bits, "answers": len(pairs)}
            table.add_row(dtype, name, str(len(pairs)), str(tokens), str(bits))
    return table, found


def _answers(length: int, **settings: Any) -> list[tuple[list[int], list[float]]]:
    """Returns each answer's tokens and their log-probabilities."""
    params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True, logprobs=0)
    chats = [[{"role": "user", "content": question}] for question in _QUESTIONS]
    with LLM(max_num_seqs=8, max_model_len=length + 100, **settings) as llm:
        outputs = [output.outputs[0] for output in llm.chat(chats, params, use_tqdm=False)]
    answers = []
    for output in outputs:
        given = zip(output.token_ids, output.logprobs or [], strict=True)
        answers.append((list(output.token_ids), [each[token].logprob for token, each in given]))
    return answers
