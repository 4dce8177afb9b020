"""lm-eval: log-likelihoods, perplexity and generation on tasks and tokenizers of local files."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from checks import BASE, MODEL, main
from lm_eval.tasks import TaskManager

SUMS = [{"question": f"What is {a} plus {5 - a}?", "answer": "5", "label": 1} for a in range(4)]
COMMON = {"dataset_path": "json", "test_split": "test", "dataset_name": None}
TASKS: dict[str, dict[str, Any]] = {
    "sums_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": ["zebra", "5"],
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}],
    },
    "sums_perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "sums_text": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False},
        "filter_list": [
            {
                "name": "number",
                "filter": [
                    {"function": "regex", "regex_pattern": r"(\d+)\.?$"},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [{"metric": "exact_match"}],
    },
}


def evaluate(kind: str, path: str, tasks: list[str], **options: Any) -> dict[str, Any]:
    """Returns the results of the tasks, by their names. options: of the model."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "sums.jsonl")
        data.write_text("".join(json.dumps(row) + "\n" for row in SUMS))
        for name in tasks:
            files = {"data_files": {"test": str(data)}}
            task = {"task": name, **COMMON, "dataset_kwargs": files, **TASKS[name]}
            Path(folder, f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML, too
        results = lm_eval.simple_evaluate(
            model=kind,
            model_args={"model": MODEL, "base_url": f"{BASE}/{path}", **options},
            tasks=tasks,
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            apply_chat_template=kind == "local-chat-completions",
            bootstrap_iters=0,
        )
    assert results is not None
    return dict(results["results"])


def check_completions_with_the_tokenizer_of_the_server() -> None:
    """The default: token ids come from /tokenize, special tokens from /tokenizer_info."""
    results = evaluate("local-completions", "completions", list(TASKS), batch_size=4)
    assert 0 <= results["sums_choice"]["acc,none"] <= 1
    assert 1 < results["sums_perplexity"]["word_perplexity,none"] < 1e9
    assert "exact_match,number" in results["sums_text"]


def check_completions_with_a_tokenizer_of_local_files() -> None:
    """The scores are the same as with the server's, from the same first token."""
    tasks = ["sums_choice", "sums_perplexity"]
    local = {"tokenizer_backend": "huggingface", "tokenizer": os.environ["CLIENTS_TOKENIZER"]}
    results = [
        evaluate("local-completions", "completions", tasks, custom_prefix_token_id=0, **options)
        for options in (local, {"num_concurrent": 4})
    ]
    for name, metric in (("sums_choice", "acc,none"), ("sums_perplexity", "word_perplexity,none")):
        assert results[0][name][metric] == results[1][name][metric], name


def check_chat_completions() -> None:
    results = evaluate("local-chat-completions", "chat/completions", ["sums_text"])
    assert results["sums_text"]["exact_match,number"] == 1, results


if __name__ == "__main__":
    main()
