"""Answers in the format of each family, recorded and made up, and what they say."""

from __future__ import annotations

from typing import Any

PARIS = {"city": "Paris", "days": 3}
Wanted = list[tuple[str, Any]]


def call(name: str = "get_weather", **arguments: Any) -> tuple[str, Any]:
    return name, arguments


CASES: list[tuple[str, str, Wanted]] = [
    # Llama 4, LFM2, OLMo 3 and others: calls of Python
    (
        "llama4_pythonic",
        '[get_weather(city="Paris", days=3), now()]',
        [call(**PARIS), call("now")],
    ),
    (
        "llama4_pythonic",
        "<|python_start|>[get_weather(city='Paris', days=3)]<|python_end|>",
        [call(**PARIS)],
    ),
    (
        "pythonic",
        '[get_weather(city="O\'Hare \\"x\\" \\u00fc\\n", exact=True, unit=None, share=-.5, '
        'tags=["a", \'b\'], where={"a": {"b": [1, 2.50]}, \'c\': False}, days=1_000)]',
        [
            call(
                city='O\'Hare "x" ü\n',
                exact=True,
                unit=None,
                share=-0.5,
                tags=["a", "b"],
                where={"a": {"b": [1, 2.5]}, "c": False},
                days=1000,
            )
        ],
    ),
    ("pythonic", "[1, 2]", [("text", "[1, 2]")]),
    ("pythonic", "[other(a=1)]", [("text", "[other(a=1)]")]),
    ("pythonic", "[now(1)]", [("text", "[now(1)]")]),
    ("pythonic", "[link](http://a)", [("text", "[link](http://a)")]),
    ("pythonic", "[now()] done", [call("now"), ("text", "done")]),
    ("pythonic", "[now(), 3]", [call("now"), ("text", ", 3]")]),
    (
        "lfm2",
        'Sure. <|tool_call_start|>[get_weather(city="Paris", days=3)]<|tool_call_end|>Checking.',
        [("text", "Sure."), call(**PARIS), ("text", " Checking.")],
    ),
    # what a malformed call leaves is dropped up to the marker after it
    (
        "lfm2",
        "<|tool_call_start|>[get_weather(days=3), two words]<|tool_call_end|> x",
        [call(days=3), ("text", "x")],
    ),
    ("lfm2", "<|tool_call_start|>[now(), two words", [call("now"), ("text", ", two words")]),
    ("lfm2", "<|tool_call_start|>[now(), get_w", [call("now")]),
    ("lfm2", "<|tool_call_start|>[get_weather(days=3), get_weather(ci", [call(days=3)]),
    ("lfm2", "<|tool_call_start|>[now(),", [call("now")]),
    # a quote ends a string only before what may follow a string at its place
    (
        "lfm2",
        '<|tool_call_start|>[get_weather(city="x = {"a": 1}", where={"b": ["c: "d": e"]})]'
        "<|tool_call_end|>",
        [call(city='x = {"a": 1}', where={"b": ['c: "d": e']})],
    ),
    # LFM2's template writes strings without escapes
    ("lfm2", "<|tool_call_start|>[get_weather(city='it's')]", [call(city="it's")]),
    ("lfm2", "<|tool_call_start|>[get_weather(city=''), now()]", [call(city=""), call("now")]),
    ("lfm2", "<|tool_call_start|>none", [("text", "<|tool_call_start|>none")]),
    (
        "olmo3",
        "<function_calls>\nget_weather(city='Paris', days=3)\nnow()\n</function_calls>",
        [call(**PARIS), call("now")],
    ),
    (
        "olmo3",
        "<function_calls>\nget_weather(exact=true, unit=null)\n</function_calls> x",
        [call(exact=True, unit=None), ("text", "x")],
    ),
    (
        "olmo3",
        "I say: <function_calls>\nnow()\nthen  some text",
        [("text", "I say:"), call("now"), ("text", "\nthen  some text")],
    ),
    # Mistral, old and new; each is read whatever the template has
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]',
        [call(**PARIS)],
    ),
    (
        "mistral_args",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now[ARGS]{}',
        [call(**PARIS), call("now")],
    ),
    (
        "mistral_args",
        'Hm.[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "[ARGS]"}',
        [("text", "Hm."), call(city="[ARGS]")],
    ),
    ("mistral", '[TOOL_CALLS]now[ARGS]{"a": 1}', [call("now", a=1)]),
    (
        "mistral_args",
        '[TOOL_CALLS]get_weather{"city": "[ARGS]", "days": 3}[TOOL_CALLS]now {}',
        [call(city="[ARGS]", days=3), ("text", "[TOOL_CALLS]now {}")],
    ),
    ("mistral_args", "[TOOL_CALLS]no w{}", [("text", "[TOOL_CALLS]no w{}")]),
    ("mistral_args", '[TOOL_CALLS][{"name": "now", "arguments": {}}]', [call("now")]),
    ("mistral_args", "[TOOL_CALLS] none at all", [("text", "[TOOL_CALLS] none at all")]),
    ("mistral_args", "[TOOL_CALLS]now[ARGS]3", [("text", "[TOOL_CALLS]now[ARGS]3")]),
    # Qwen3-Coder: newlines around a value are the tag's
    (
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        [("text", "I look."), call(**PARIS)],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n\n line\n\n</parameter>\n"
        "<parameter=exact>\nTrue\n</parameter>\n<parameter=unit>\nnull\n</parameter>\n"
        '<parameter=tags>\n["a", "</x>"]\n</parameter>\n<parameter=where>\n{\'a\': None}\n'
        "</parameter>\n<parameter=share>\n1\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [
            call(
                city="\n line\n",
                exact=True,
                unit=None,
                tags=["a", "</x>"],
                where={"a": None},
                share=1,
            ),
            call("now"),
        ],
    ),
    # what does not fit its type is a string, and a text without a type is JSON if it can be
    (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=days>\nsoon\n</parameter><parameter=new>\n"
        "[1]\n</parameter><parameter=old>\n5 <b> {\n</parameter></function></tool_call> !",
        [call(days="soon", new=[1], old="5 <b> {"), ("text", "!")],
    ),
    ("qwen3_coder", "<function=now>\n</function>\n</tool_call>", [call("now")]),
    ("qwen3_coder", "a <tool_call>\n<function=no w>", [("text", "a <tool_call>\n<function=no w>")]),
    ("qwen3_coder", "use <function=f> here", [("text", "use <function=f> here")]),
    ("qwen3_coder", "<tool_call>{}</tool_call>", [("text", "<tool_call>{}</tool_call>")]),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "<parameter=days>3</parameter>\n<parameter=tags>['a']</parameter>\n</function>\n"
        "</seed:tool_call>",
        [call(**PARIS, tags=["a"])],
    ),
    # GLM-4.5 with newlines, GLM-4.7 without
    (
        "glm45",
        "\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        [call(**PARIS)],
    ),
    (
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>5</arg_value></tool_call>"
        "<tool_call>now</tool_call>",
        [call(city="5"), call("now")],
    ),
    (
        "glm45",
        "<tool_call>get_weather<arg_key>days</arg_key><arg_value>3</arg_value> junk</tool_call>\nx",
        [call(days=3), ("text", "x")],
    ),
    ("glm45", "<tool_call>is a tag", [("text", "<tool_call>is a tag")]),
    ("glm45", "<tool_call>now", [("text", "<tool_call>now")]),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris'
        '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n'
        "</invoke>\n</minimax:tool_call>",
        [call(**PARIS), call("now")],
    ),
    ("minimax_m2", '<minimax:tool_call><invoke name="a b">', [
        ("text", '<minimax:tool_call><invoke name="a b">')]),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
        "<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [call(**PARIS), call("now")],
    ),
    (
        "deepseek_v31",
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris", "days": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [("text", "Hm."), call(**PARIS), call("now")],
    ),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>?", [("text", "<｜tool▁calls▁begin｜>?")]),
    (
        "deepseek_v32",
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="unit" string="true">null</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="new" string="false">{"a": [1]}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        [call(**PARIS, unit="null", new={"a": [1]})],
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris", "days": 3}<|tool_call_end|>'
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [call(**PARIS), call("now")],
    ),
    # Gemma's notation has no quotes but its own
    (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Pa"ris, {1}<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:get_weather{exact:true,tags:[<|"|>a<|"|>,<|"|><|"|>],'
        'where:{a:{b:null},<|"|>c d<|"|>:-1.5e3},unit:f}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        [
            call(city='Pa"ris, {1}', days=3),
            call(exact=True, tags=["a", ""], where={"a": {"b": None}, "c d": -1500.0}, unit="f"),
            call("now"),
        ],
    ),
    ("gemma4", "<|tool_call>call now<tool_call|>", [("text", "<|tool_call>call now<tool_call|>")]),
    (
        "gemma4",
        "a <|tool_call>call:now{}<tool_call|> b\n<|tool_call>call:now{}<tool_call|>\n\n    c",
        [("text", "a"), call("now"), ("text", " b"), call("now"), ("text", "\n\n    c")],
    ),
    ("gemma4", "<|tool_call>call:now{}<tool_call|>\n\n    c", [call("now"), ("text", "    c")]),
    (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}"
        "<end_function_call>",
        [call(**PARIS)],
    ),
    # lists of JSON
    ("granite", '<|tool_call|>[{"name": "now", "arguments": {}}]', [call("now")]),
    ("granite", '<tool_call>[{"arguments": {}, "name": "now"}] x', [call("now"), ("text", "x")]),
    (
        "phi4_mini",
        '<|tool_call|>[{"name": "now", "arguments": {}},{"name": "now", "parameters": {"a": 1}}]'
        "<|/tool_call|>",
        [call("now"), call("now", a=1)],
    ),
    ("phi4_mini", '<|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|>', [call("now")]),
    (
        "phi4_mini",
        '<|tool_call|>[{"name": "now", "arguments": {}}, 3] and <|/tool_call|> x',
        [call("now"), ("text", "x")],
    ),
    ("phi4_mini", '<|tool_call|>[{"name": "now", "arguments": {}}, {"na', [call("now")]),
    (
        "hermes",
        '<tool_call>\n{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {"a": 1}}\n'
        '</tool_call>',
        [call("now"), call("now", a=1)],
    ),
    (
        "hermes",
        '<tool_call>{"name": "now", "arguments": {}}\n{"note": 1}</tool_call>',
        [call("now")],
    ),
    (
        "hermes",
        'a<tool_call>{"name": "now", "arguments": {}, "x": "' + "y" * 1100 + '"}</tool_call>b',
        [("text", "a"), call("now"), ("text", "b")],
    ),
    (
        "llama3_json",
        'a <|python_tag|>{"name": "now", "arguments": {}} then; b',
        [("text", "a"), call("now"), ("text", " then; b")],
    ),
    (
        "llama4_json",
        '<|python_start|>a<|python_end|>{"name": "now", "parameters": {}}'
        '{"name": "now", "parameters": {"a": "}"}}',
        [("text", "a"), call("now"), call("now", a="}")],
    ),
    ("phi4_mini_json", 'functools[{"name": "now", "arguments": {}}]', [call("now")]),
    ("phi4_mini_json", "functools is a module", [("text", "functools is a module")]),
    (
        "hunyuan_a13b",
        '<tool_calls>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {"a": "]"}}]'
        "</tool_calls>",
        [call("now"), call("now", a="]")],
    ),
    (
        "cohere_command3",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        '{"city": "Paris", "days": 3}},\n    {"tool_name": "now", "parameters": {}}\n]'
        "<|END_ACTION|>",
        [call(**PARIS), call("now")],
    ),
    (
        "apertus",
        '<|tools_prefix|>[{"get_weather": {"city": "Paris", "days": 3}}, {"now": {}}]'
        "<|tools_suffix|>",
        [call(**PARIS), call("now")],
    ),
    (
        "internlm",
        '<|action_start|><|plugin|>\n{"name": "now", "parameters": {}}<|action_end|>',
        [call("now")],
    ),
    # Harmony: messages on channels
    (
        "openai",
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 3}<|call|>',
        [("reasoning", "Look."), call(**PARIS)],
    ),
    (
        "openai",
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        [call("now")],
    ),
    (
        "openai",
        " to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        [call("now")],
    ),
    (
        "openai",
        " to=you<|end|><|start|>assistant<|channel|>final<|message|>yes",
        [("text", " to=you\nyes")],
    ),
    ("openai", " to=you and me", [("text", " to=you and me")]),
    ("openai", "to=now<|message|>{}", [("text", "to=now<|message|>{}")]),
    (
        "openai",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>analysis"
        "<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
        "<|start|>assistant<|channel|>final<|message|>1 < 2 <|x|><|return|>",
        [("text", "I look."), ("reasoning", "a\nb"), ("text", "\n1 < 2 <|x|>")],
    ),
    ("openai", "goes on", [("text", "goes on")]),
    (
        "openai",
        "<|channel|>commentary to=functions.now<|message|>no object<|call|>",
        [("text", "<|channel|>commentary to=functions.now<|message|>no object")],
    ),
    (
        "openai",
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        [("text", "<|channel|>analysis to=python code<|message|>print(1)")],
    ),
]  # fmt: skip

REASONED = [
    ("deepseek_r1", "<think>\nhm\n</think>\n\nYes", "hm", "Yes"),
    ("mistral", "[THINK]hm[/THINK]Yes", "hm", "Yes"),
    ("seed_oss", "<seed:think>hm</seed:think>Yes", "hm", "Yes"),
    ("gemma4", "<|channel>thought\nhm<channel|>Yes", "hm", "Yes"),
    ("granite", "Here's my thought process: hm Here is my response: Yes", " hm ", " Yes"),
    ("ernie45", "<think>hm</think>\n<response>\nYes\n</response>\n", "hm", "Yes\n"),
    ("ernie45", "<response>Yes</response>", "", "Yes"),
    ("ernie45", "<think>hm</think>\n\n<resp", "hm", "<resp"),
    ("hunyuan_a13b", "<think>\nhm\n</think>\n<answer>\nYes <b>\n</answer>", "hm", "Yes <b>"),
    (
        "cohere_command3",
        "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Yes<|END_RESPONSE|>",
        "hm",
        "Yes",
    ),
    ("apertus", "<|inner_prefix|>hm<|inner_suffix|>Yes", "hm", "Yes"),
    ("openai_gptoss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final"
     "<|message|>Yes<|return|>", "hm", "Yes"),
]  # fmt: skip
