"""Settings of `serve run` mean the same as a flag, in the environment and in a file."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from memory.policies.setting import OFF, POLICIES
from serve.cli.config_file import ConfigFile, parse_size, toml_value
from serve.cli.main import app
from serve.cli.run import run_command
from serve.cli.run_settings import IN_PYTHON_ONLY, OWNERS, SETTINGS, Setting, config_lines, resolve
from serve.cli.setting_panels import PANELS
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.units import format_size
from tests.support.http.settings_table import PAGE, with_table
from tests.support.profile import examples

ROOT = Path(__file__).parents[3]
# Valid values beside the default, for settings whose kind alone does not give one.
VALUES: dict[str, Any] = {
    "borrow": ["tcp://a:1", "tcp://b:2"],
    "cors_origins": ["https://a.example", "http://localhost:3000"],
    "host": "localhost",
    "kv_group": 32,
    "kv_page_bytes": 65536,
    "kv_listen": "tcp://a:1",
    "kv_policy": "quest:budget=12%",
    "kv_peers": ["tcp://a:1", "tcp://b:2"],
    "kvp": ["tcp://a:1", "tcp://b:2"],
    "kvp_segment_tokens": 4096,
    "lend": "tcp://a:1",
    "kv_events": "tcp://*:1",
    "kv_events_replay_endpoint": "ipc:///tmp/a",
    "log_level": "debug",
    "max_draft_tokens": 7,
    "memory_nodes": ["tcp://a:1", "tcp://b:2"],
    "speculation": "off",
    "weight_group": 32,
    "weights_from": ["tcp://a:1", "tcp://b:2"],
    "weights_listen": "tcp://a:1",
}
PLAIN = {name: item for name, item in SETTINGS.items() if not item.option.is_secret}
ONLY_RUN = typer.Typer(pretty_exceptions_enable=False)  # faster to build than all commands
ONLY_RUN.command()(run_command)


def invoke(*arguments: str, env: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(ONLY_RUN, arguments, env=env)


def printed(*arguments: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    result = invoke(*arguments, "--print-config", env=env)
    assert result.exit_code == 0, result.output
    return tomllib.loads(result.stdout)


def test_a_type_of_kv_has_the_name_that_vllm_gives_it():
    for flag in ("--kv-dtype", "--kv-cache-dtype"):
        assert printed(flag, "int4")["kv_dtype"] == "int4"


def another_value(setting: Setting) -> Any:
    if setting.name in VALUES:
        return VALUES[setting.name]
    if setting.option.choices:
        return next(choice for choice in setting.option.choices if choice != setting.default)
    return {
        "boolean": not setting.default,
        "integer": 77,
        "number": 7.5,
        "size": 3 << 20,
        "text": "something",
        "list": ["one", "two"],
    }[setting.kind]


def as_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, list) else str(value)


def as_flags(setting: Setting, value: Any) -> list[str]:
    if setting.name == "model":
        return [value]
    if setting.name == "more_models":
        return [SETTINGS["model"].default, *value]
    if isinstance(value, bool):
        return [setting.flag if value else setting.flag.replace("--", "--no-", 1)]
    return [setting.flag, as_text(value)]


def as_toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else as_text(value)


def test_the_help_names_all_kv_policies() -> None:
    text = SETTINGS["kv_policy"].option.help
    assert all(name in text for name in (*POLICIES, OFF))


def test_every_field_is_a_flag_a_variable_and_a_key() -> None:
    """A new field of a dataclass must be declared in setting_help.py."""
    command: Any = typer.main.get_command(app)
    parameters = {item.name: item for item in command.commands["run"].params}
    names = [item.name for owner, _ in OWNERS for item in fields(owner)]
    assert len(set(names)) == len(names), "two dataclasses have a field of one name"
    assert set(names) - IN_PYTHON_ONLY == set(SETTINGS)
    assert set(SETTINGS) == {name for _, options in OWNERS for name in options}
    assert set(parameters) - set(PLAIN) == {"config", "print_config"}
    assert set(SETTINGS) - set(PLAIN) == {"api_keys"}
    for setting in PLAIN.values():
        parameter = parameters[setting.name]
        assert setting.flag in (*parameter.opts, "MODEL")
        envs = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar
        assert envs[0] == setting.env == f"MERGESTEP_{setting.name.upper()}"
        assert setting.option.panel in PANELS
        assert (parameter.default or None) == (setting.default or None)


@pytest.mark.parametrize("setting", PLAIN.values(), ids=PLAIN)
def test_flag_variable_and_file_mean_the_same(setting: Setting, tmp_path: Path) -> None:
    value = another_value(setting)
    file = tmp_path / "server.toml"
    file.write_text(f"{setting.name} = {as_toml(value)}\n")
    by_flag = printed(*as_flags(setting, value))
    assert value != setting.default
    assert by_flag == printed(env={setting.env: as_text(value)})
    assert by_flag == printed("--config", str(file))
    shown = by_flag[setting.name]
    assert (parse_size(shown) if setting.kind == "size" else shown) == value


def test_precedence(tmp_path: Path) -> None:
    """A flag precedes the environment, the file and the default; each line names its origin."""
    file = tmp_path / "server.toml"
    file.write_text('port = 1\nhost = "127.0.0.3"\norder = "fair"\n')
    env = {"MERGESTEP_PORT": "2", "MERGESTEP_HOST": "127.0.0.2", "MERGESTEP_CONFIG": str(file)}
    result = invoke("--port", "3", "--print-config", env=env)
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "port = 3 # flag --port" in lines
    assert 'host = "127.0.0.2" # environment MERGESTEP_HOST' in lines
    assert f'order = "fair" # file {file}' in lines
    assert "drain_s = 30.0 # default" in lines
    assert "# seed = # default: none" in lines


def test_a_printed_configuration_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    first = printed("--kv-cache-bytes", "1000", "--served-model-name", 'a "b" \\ c', "-q")
    file.write_text(invoke("--config", str(_written(file, first)), "--print-config").stdout)
    assert printed("--config", str(file)) == first
    assert first["kv_cache_bytes"] == 1000
    assert first["served_model_name"] == 'a "b" \\ c'


def _written(file: Path, values: dict[str, Any]) -> Path:
    texts = {name: as_toml(value) for name, value in values.items()}
    texts["served_model_name"] = "'a \"b\" \\ c'"
    file.write_text("".join(f"{name} = {text}\n" for name, text in texts.items()))
    return file


def test_a_file_name_may_have_several_lines(tmp_path: Path) -> None:
    file = tmp_path / "a\nport = 1"
    file.write_text("port = 5")
    assert printed("--config", str(file))["port"] == 5


def test_a_flag_overrides_a_file(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text("quiet = true\nprefix_cache = false\n")
    values = printed("--config", str(file), "--no-quiet", "--prefix-cache")
    assert (values["quiet"], values["prefix_cache"]) == (False, True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[server]\nport = 5", "no setting 'server': settings must not stand in a table"),
        ("max_model_length = 3", "no setting 'max_model_length'; did you mean max_model_len?"),
        ("[engine]\nport = 1", "no setting 'engine'"),
        ("port = 'x'", "port must be a whole number"),
        ("port = true", "port must be a whole number"),
        ("port = 1.5", "port must be a whole number"),
        ("drain_s = '1'", "drain_s must be a number"),
        ("host = 1", "host must be a string"),
        ("quiet = 1", "quiet must be true or false"),
        ("kv_cache_bytes = '1e9'", "kv_cache_bytes: '1e9' is not a size"),
        ("kv_cache_bytes = 1.5", "kv_cache_bytes must be a whole number of bytes or a size"),
        ("memory_nodes = [1]", "memory_nodes must be a list of strings"),
        ("port = ", "is not TOML: Invalid value"),
        ("a = " + "[" * 5000, "is not TOML"),
        ("port = 1" + "0" * 5000, "is not TOML"),
        ("port = 99999", "port must be between 0 and 65535, not 99999 (file"),
        ("max_num_seqs = 0", "max_num_seqs must be a positive integer, not 0 (file"),
        ("log_level = 'loud'", "'loud' is not a log level"),
    ],
)
def test_an_invalid_file_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text)
    result = invoke("--config", str(file), "--print-config")
    assert result.exit_code == 2
    assert expected in " ".join(result.stderr.replace("│", "").split())
    assert str(file) in result.stderr or "log level" in expected
    assert "Traceback" not in result.output


VALUES_OF_TOML = st.one_of(
    st.booleans(),
    st.integers(-(10**400), 10**400),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.sampled_from(["auto", "default", "4GiB", "1e9", ""]),
    st.lists(st.text("ab:/,1", max_size=6), max_size=3),
)


@examples(400, derandomize=True)
@given(st.dictionaries(st.sampled_from([*SETTINGS, "modell", "a b"]), VALUES_OF_TOML, max_size=4))
def test_any_file_gives_settings_or_an_error(values: dict[str, Any]) -> None:
    """A file with any content raises nothing but ConfigError."""
    lines = [f"{toml_value(key)} = {toml_value(value)}" for key, value in values.items()]
    file = ConfigFile("x.toml", tomllib.loads("\n".join(lines)))
    try:
        settings = resolve({}, lambda name: "DEFAULT", file, {})
        for owner, _ in OWNERS:
            settings.make(owner)
    except ConfigError:
        return
    again = tomllib.loads("\n".join(config_lines(settings)))
    assert set(values) <= set(again)


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "No such file"), (b"\xff", "is not UTF-8"), (b"#" * (2 << 20), "larger than 1 MiB")],
)
def test_an_unreadable_file_is_refused(
    content: bytes | None, expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "server.toml"
    if content is not None:
        file.write_bytes(content)
    result = invoke("--config", str(file), "--print-config")
    assert result.exit_code == 2
    assert expected in result.stderr


def test_an_invalid_variable_is_named() -> None:
    result = invoke("--print-config", env={"MERGESTEP_PORT": "x"})
    assert result.exit_code == 2
    assert "MERGESTEP_PORT" in result.stderr
    result = invoke("--print-config", env={"MERGESTEP_MAX_NUM_SEQS": "0"})
    assert result.exit_code == 2
    assert "not 0 (environment MERGESTEP_MAX_NUM_SEQS)" in result.stderr


def test_secrets_come_from_the_environment_and_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MERGESTEP_API_KEY", "a-key-of-sixteen-and-more, me:another-key-of-sixteen")
    result = invoke("--print-config", "--host", "0.0.0.0")
    assert result.exit_code == 0, result.output
    assert "environment MERGESTEP_API_KEY: hidden" in result.stdout
    assert "sixteen" not in result.output
    assert "MERGESTEP_API_KEY" not in os.environ
    file = tmp_path / "server.toml"
    file.write_text('api_keys = ["a-key-of-sixteen-and-more"]')
    result = invoke("--config", str(file))
    assert result.exit_code == 2
    assert "api_keys is secret; set MERGESTEP_API_KEY in the environment" in result.stderr
    assert invoke("--api-keys", "x").exit_code == 2


@pytest.mark.process
def test_the_system_does_not_show_secrets_either() -> None:
    """/proc/PID/environ shows a variable that was removed from the environment."""
    script = (
        "from pathlib import Path\n"
        "from typer.testing import CliRunner\n"
        "from serve.cli.main import app\n"
        "print('sixteen' in Path('/proc/self/environ').read_text())\n"
        "result = CliRunner().invoke(app, ['run', '--print-config'])\n"
        "print('environment MERGESTEP_API_KEYS: hidden' in result.stdout)\n"
        "print('sixteen' in Path('/proc/self/environ').read_text())\n"
    )
    names = ("MERGESTEP_API_KEYS", "MERGESTEP_API_KEY")
    environment = dict.fromkeys(names, "a-key-of-sixteen-and-more")
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["True", "True", "False"]


def test_a_misspelt_variable_gives_a_warning() -> None:
    result = invoke("--print-config", env={"MERGESTEP_MAX_MODEL_LENGTH": "9"})
    assert result.exit_code == 0
    assert "did you mean MERGESTEP_MAX_MODEL_LEN?" in result.stderr


def test_older_names_work() -> None:
    assert printed("--inter-token-slo", "50")["inter_token_slo_ms"] == 50
    key = {"MERGESTEP_NODE_KEY_FILE": "key"}
    assert printed(env=key)["memory_node_key_file"] == "key"
    assert "# environment MERGESTEP_NODE_KEY_FILE" in invoke("--print-config", env=key).stdout


@pytest.mark.parametrize("size", [1, 1000, 1024, 65536, 3 << 29, 1 << 40, 5 << 41])
def test_formatted_sizes_can_be_parsed(size: int) -> None:
    assert parse_size(format_size(size)) == size


def test_defaults_are_those_of_the_dataclasses() -> None:
    values = printed()
    for item in fields(EngineConfig):
        if item.name in values:
            shown = values[item.name]
            assert (tuple(shown) if isinstance(shown, list) else shown) == item.default


def test_the_page_lists_every_setting() -> None:
    """If this fails, `python tests/support/http/settings_table.py` rewrites the table."""
    page = PAGE.read_text()
    assert with_table(page) == page
    assert all(f"| `{name}` |" in page for name in SETTINGS)


def test_the_example_of_the_page_works(tmp_path: Path) -> None:
    example = PAGE.read_text().partition("```toml\n")[2].partition("```")[0]
    file = tmp_path / "server.toml"
    file.write_text(example)
    values = printed("--config", str(file), "--port", "9001")
    assert (values["port"], values["kv_cache_bytes"]) == (9001, "2GiB")
    assert len(values["memory_nodes"]) == 2
