"""Valid and invalid requests that schemathesis makes from the server's OpenAPI description.

`python -m tests.fuzz.described --seconds N` runs it for long. No answer may be a 5xx or missing in
the description, and a request that the description forbids must be refused.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import hypothesis
import schemathesis
from schemathesis.generation import GenerationMode

from serve import Engine
from serve.http import HttpSettings
from tests.support.engine.checkpoints import checkpoint
from tests.support.http.running_server import ServerThread

CONFIG = Path(__file__).with_name("schemathesis.toml")
KEY = "key-of-the-fuzzer"
ENDLESS = "/live"  # only the client ends this stream
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
)


# includes 413, since a body beyond a bound may be too large to be read
REFUSALS = [400, 401, 403, 404, 405, 413, 431]


def described_server() -> ServerThread:
    """Returns a real server with an API key over a small engine."""
    engine = Engine(str(checkpoint("llama")), served_model_name="m", max_model_len=64)
    return ServerThread(engine, HttpSettings(port=0, api_keys=(KEY,)))


def send_examples(url: str, *, valid: int, invalid: int) -> int:
    """Returns the number of requests sent. valid and invalid bound the requests of each operation.
    Raises at the first wrong answer."""
    headers = {"Authorization": f"Bearer {KEY}"}
    config = schemathesis.Config.from_path(CONFIG)
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", config=config, headers=headers)
    checks = schemathesis.checks.CHECKS.get_by_names(list(CHECKS))
    count = 0
    for result in schema.exclude(path=ENDLESS).get_all_operations():
        operation = result.ok()
        for mode, most in ((GenerationMode.POSITIVE, valid), (GenerationMode.NEGATIVE, invalid)):
            if mode is GenerationMode.NEGATIVE and not operation.body:
                continue

            @hypothesis.seed(1)
            @hypothesis.settings(
                max_examples=most,
                deadline=None,
                database=None,
                phases=[hypothesis.Phase.generate],
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def send(case: schemathesis.Case) -> None:
                nonlocal count
                count += 1
                case.call_and_validate(checks=checks, headers=headers)

            send()
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with described_server() as server:
        program = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG)]
        command = [*program, "run", f"{server.url}/openapi.json"]
        options = [
            *("--checks", ",".join(CHECKS), "--header", f"Authorization: Bearer {KEY}"),
            *("--phases", "coverage,fuzzing", "--max-time", str(arguments.seconds)),
            *("--seed", str(arguments.seed), "--suppress-health-check", "all", "--warnings", "off"),
            *("--continue-on-failure", "--exclude-path", ENDLESS),
        ]
        sys.exit(subprocess.run([*command, *options], check=False).returncode)


if __name__ == "__main__":
    main()
