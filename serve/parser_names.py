"""The names of the formats in which models write tool calls and mark their reasoning."""

# The formats of serve.text.chat_parser.formats and their other names, which are vLLM's.
TOOL_PARSERS = (
    *("auto", "apertus", "cohere_command3", "deepseek_v3", "deepseek_v31", "deepseek_v32"),
    *("ernie45", "functiongemma", "gemma4", "glm45", "glm47", "granite", "granite4", "hermes"),
    *("hunyuan_a13b", "internlm", "jamba", "kimi_k2", "lfm2", "llama3_json", "llama4_json"),
    *("llama4_pythonic", "mimo", "minimax_m2", "mistral", "mistral_args", "olmo3", "openai"),
    *("phi4_mini", "phi4_mini_json", "pythonic", "qwen3_coder", "qwen3_xml", "seed_oss", "none"),
)
REASONING_PARSERS = (
    *("auto", "apertus", "cohere_command3", "deepseek_r1", "deepseek_v3", "ernie45", "gemma4"),
    *("glm45", "glm47", "granite", "holo2", "hunyuan_a13b", "kimi_k2", "mimo", "minimax_m2"),
    *("mistral", "nemotron_v3", "olmo3", "openai_gptoss", "qwen3", "seed_oss", "step3"),
    *("step3p5", "none"),
)
