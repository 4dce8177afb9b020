"""`serve eval` compares precisions on a text, and `serve quantize` rounds weights by one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from serve.cli.model_files import find_model
from serve.cli.quality import Evaluation, Variant, evaluate
from serve.config import EngineConfig
from serve.errors import ConfigError, reason
from serve.models import read_spec
from serve.regular_file import open_regular
from serve.single_file.config import with_directory

PLAIN_PRECISIONS = ("float32", "bfloat16", "int8/float32", "float32/int8", "int8")
PACKED_PRECISIONS = ("bfloat16", "int8/bfloat16", "int8")
_HELDOUT = Path(__file__).parents[2] / "bench" / "data" / "heldout.txt"
MAX_TEXT_BYTES = 64 << 20


def run_eval(
    model: str,
    text_file: Path | None,
    precisions: Sequence[str] | None,
    *,
    max_tokens: int,
    window: int,
    weight_group: int,
    kv_group: int,
    tokenizer: str | None,
    json_file: Path | None,
) -> None:
    """Prints the table. `precisions` None takes those that suit the checkpoint."""
    if max_tokens < 2 or window < 2:
        raise ConfigError("max_tokens and window must be at least 2")
    if json_file is not None:
        check_writable(json_file)
    text = _read_text(text_file or _HELDOUT)
    if precisions is None:
        config = with_directory(EngineConfig(model=model, tokenizer=tokenizer))
        is_packed = read_spec(config.model_path).packed is not None
        precisions = PACKED_PRECISIONS if is_packed else PLAIN_PRECISIONS
    console = Console()
    with Console(stderr=True).status("loading") as status:
        results = evaluate(
            model,
            text,
            [parse_variant(item) for item in precisions],
            max_tokens=max_tokens,
            window=window,
            weight_group=weight_group,
            kv_group=kv_group,
            tokenizer=tokenizer,
            report=lambda line: status.update(f"reading in {line}"),
        )
    console.print(_table(results))
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n")


def run_quantize(
    model: str, output: Path, text_file: Path, *, max_tokens: int, window: int, weight_group: int
) -> None:
    """Writes the quantized checkpoint and prints what was done."""
    from serve.calibration.quantize import quantize_checkpoint

    if max_tokens < 2 or window < 2:
        raise ConfigError("max_tokens and window must be at least 2")
    config = EngineConfig(model=model, weight_group=weight_group)
    console = Console()
    with Console(stderr=True).status("reading the text") as status:
        done = quantize_checkpoint(
            config.model_path,
            output,
            _read_text(text_file),
            group=weight_group,
            max_tokens=max_tokens,
            window=window,
            report=status.update,
        )
    console.print(
        f"{output}: {done.num_products} products in int4, {done.size_bytes / 1e6:,.1f} MB;"
        f" {done.num_tokens:,} tokens were read"
    )
    if done.num_plain:
        console.print(
            f"{done.num_plain} products stay as they are: their inputs cannot be divided into"
            f" groups of {weight_group}"
        )


def _read_text(file: Path) -> str:
    try:
        with open_regular(file) as opened:
            data = opened.read(MAX_TEXT_BYTES + 1)
        if len(data) > MAX_TEXT_BYTES:
            raise ConfigError(f"--text {file} is larger than {MAX_TEXT_BYTES >> 20} MiB")
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {file} is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise ConfigError(f"--text {file}: {reason(error)}") from error


def check_writable(file: Path, option: str = "--json") -> None:
    """Raises ConfigError, which names the option, before the work where the file could not be
    written after it."""
    is_new = not file.exists()
    try:
        file.open("a").close()
    except OSError as error:
        raise ConfigError(f"{option} {file} cannot be written: {reason(error)}") from error
    if is_new:
        file.unlink()


def parse_precision(text: str) -> tuple[str, str]:
    """Parses "DTYPE/KV_DTYPE"; without a slash the type of K/V is "auto"."""
    dtype, _, kv_dtype = text.partition("/")
    return dtype, kv_dtype or "auto"


def parse_variant(text: str) -> Variant:
    """Parses "DTYPE/KV_DTYPE@MODEL", of which the last two may be missing."""
    precision, _, model = text.partition("@")
    return Variant(*parse_precision(precision), find_model(model).model if model else "")


def _table(results: list[Evaluation]) -> Table:
    table = Table(
        "precision", "perplexity", "change", "KL", "greedy agreement", "K/V bytes a token"
    )
    for result in results:
        table.add_row(
            result.precision,
            f"{result.perplexity:.4f}",
            f"{result.change_from(results[0]):+.3%}",
            f"{result.kl:.2e}",
            f"{result.agreement:.2%}",
            f"{result.kv_bytes_per_token:,}",
        )
    return table
