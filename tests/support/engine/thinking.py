"""A small checkpoint whose chat template begins the model's reasoning, and knows tools."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.support.engine.checkpoints import checkpoint

CONTEXT = 2048
TEMPLATE = (
    "{% for tool in tools or [] %}<tools>{{ tool | tojson }}</tools>{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
# One that always reasons and knows no switch.
ALWAYS = (
    "{# </think> #}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<think>\n{% endif %}"
)


def thinking_checkpoint(folder: Path, template: str = TEMPLATE) -> Path:
    """Copies a small llama into the folder, with this chat template."""
    path = folder / "thinks"
    shutil.copytree(checkpoint("llama"), path)
    changes = {
        "tokenizer_config.json": {"chat_template": template},
        "config.json": {"max_position_embeddings": CONTEXT},
    }
    for name, values in changes.items():
        file = path / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return path
