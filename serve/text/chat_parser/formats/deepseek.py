"""DeepSeek: names and JSON between markers with full-width bars, or tags with them.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f       V3, R1
    ```json
    {"x": 1}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}      V3.1
    <｜tool▁call▁end｜><｜tool▁calls▁end｜>
    <｜DSML｜function_calls>                                              V3.2
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="x" string="false">1</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

They are those of vLLM's tool_chat_template_deepseekv3.jinja and of the templates of R1's distilled
models, V3.1 and V3.2 in ggml-org/llama.cpp, models/templates. DeepSeek's own templates of R1, V3
and V3.1 write calls and results but show no tools, so the conversation describes these. vLLM reads
the formats in deepseekv3_tool_parser.py, deepseekv31_ and deepseekv32_tool_parser.py.
"""

from __future__ import annotations

from serve.text.chat_parser.syntax.format_types import ToolFormat
from serve.text.chat_parser.syntax.named_calls import NamedCalls
from serve.text.chat_parser.syntax.tagged_calls import TaggedCalls

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_OTHERS = (_CALL_BEGIN, _CALL_END, _SEP)

DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    families="DeepSeek V3, R1",
    begin=_BEGIN,
    end=_END,
    syntax=NamedCalls(
        head=rf"(?:function)?\s{{0,4}}{_SEP}\s{{0,4}}([A-Za-z0-9_.-]{{1,64}})",
        written_head=f"function{_SEP}{{name}}",
        before="\n```json\n",
        call_begin=_CALL_BEGIN,
        call_end=("\n```", _CALL_END),
        between="\n",
        end=_END,
    ),
    is_list=True,
    others=_OTHERS,
    marks=(_BEGIN,),
    needs=("```json",),
    example=f'{_BEGIN}{_CALL_BEGIN}function{_SEP}f\n```json\n{{"x": 1}}\n```{_CALL_END}{_END}',
)
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    families="DeepSeek V3.1",
    begin=_BEGIN,
    end=_END,
    syntax=NamedCalls(
        head=r"([A-Za-z0-9_.-]{1,64})",
        written_head="{name}",
        before=_SEP,
        call_begin=_CALL_BEGIN,
        call_end=(_CALL_END,),
        end=_END,
    ),
    is_list=True,
    others=_OTHERS,
    marks=(_BEGIN,),
    lacks=("```json",),
    example=f'{_BEGIN}{_CALL_BEGIN}f{_SEP}{{"x": 1}}{_CALL_END}{_END}',
)
DEEPSEEK_V32 = ToolFormat(
    name="deepseek_v32",
    families="DeepSeek V3.2",
    begin="<｜DSML｜function_calls>",
    end="</｜DSML｜function_calls>",
    syntax=TaggedCalls(
        call_open='<｜DSML｜invoke name="',
        name_end='">',
        call_close="</｜DSML｜invoke>",
        key_open='<｜DSML｜parameter name="',
        key_end='"',
        value_close="</｜DSML｜parameter>",
        end="</｜DSML｜function_calls>",
        is_list=True,
        says_string=True,
    ),
    is_list=True,
    others=("｜DSML｜",),
    marks=("｜DSML｜",),
    needs=("function_calls",),
    example='<｜DSML｜function_calls><｜DSML｜invoke name="f">'
    '<｜DSML｜parameter name="x" string="false">'
    "1</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
)
