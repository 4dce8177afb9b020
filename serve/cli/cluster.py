"""`serve cluster`: the options of `serve run`, and where Ray is to run the ranks."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serve.cli.reporting import reported
from serve.cli.run import keyword, resolved, signature
from serve.cli.run_settings import ProcessSettings, RunSettings
from serve.cluster.models.settings import ModelsSettings
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.http.edge.settings import HttpSettings

if TYPE_CHECKING:
    from serve.cluster.replica import Content

CLUSTER_HELP = (
    "Serve MODEL on the machines of a Ray cluster.\n\n"
    "Ray places the ranks (--tensor-parallel-size, --pipeline-parallel-size) and replaces lost"
    " ones; each is a `serve run`, whose options this command has too. MODEL must be on every"
    " machine."
)
_PANEL = "Cluster"
_KEY_BYTES = 32


def cluster_command(context: typer.Context, **given: Any) -> None:
    """Runs `serve cluster`. typer makes its options from the signature."""
    with reported():
        settings = resolved(context, given)
        process: ProcessSettings = settings.make(ProcessSettings)
        config: EngineConfig = settings.make(EngineConfig)
        http: HttpSettings = settings.make(HttpSettings)
        if settings.of(ModelsSettings):
            name = next(iter(settings.of(ModelsSettings)))
            raise ConfigError(f"{name}: `serve cluster` serves one model")
        if config.group_url is not None:
            raise ConfigError("group_url: `serve cluster` finds rank 0's address itself")
        if config.backend == "cuda":
            raise ConfigError("backend cuda: `serve cluster` reserves no GPUs")
        from serve.cluster.foreground import ClusterOptions, run_cluster
        from serve.cluster.scaling import ScalingLimits

        most = max(given["replicas"], given["max_replicas"] or 0)
        least = given["replicas"] if given["min_replicas"] is None else given["min_replicas"]
        has_fleet = most > 1 or least == 0
        if has_fleet and http.metrics_port is not None:
            raise ConfigError("metrics_port cannot be used with --replicas")

        key = _key(config)
        options = ClusterOptions(
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
            lambda cpus: content(settings, key, cpus, is_behind_front=has_fleet),
            ray_address=given["ray_address"],
            cpus_per_rank=given["cpus_per_rank"],
            placement_timeout_s=given["placement_timeout"],
            drain_s=http.drain_s,
            scaling=ScalingLimits(least, most),
            http=http,
            is_dry_run=given["dry_run"],
            is_quiet=process.quiet,
        )
        status = run_cluster(options)
    if status:
        raise typer.Exit(status)


def content(
    settings: RunSettings, key: str, cpus: int, *, is_behind_front: bool = False
) -> Content:
    """Returns what each rank runs: the settings that were given, as they were resolved here.
    is_behind_front: address and certificates are those of the hop, and rank 0 takes a
    free port."""
    from serve.cluster.replica import Content

    # the ready line alone: the summary is this command's. The content of the key file travels.
    more: dict[str, Any] = {"quiet": True}
    if "compute_threads" not in settings.of(EngineConfig):
        more["compute_threads"] = cpus
    if is_behind_front:
        more["port"] = 0
    left_out = ["group_key_file", *(("tls_cert", "tls_key") if is_behind_front else ())]
    text = settings.as_file(more, left_out)
    return Content(text, key, settings.secrets(), os.getcwd())


def _key(config: EngineConfig) -> str:
    """Returns the secret of the group: that of group_key_file, else a new one."""
    if config.group_key_file is None:
        return secrets.token_hex(_KEY_BYTES)
    from serve.loading.node_key import read_key_file

    key = read_key_file(config.group_key_file, "group_key_file")
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        raise ConfigError("group_key_file must be text for `serve cluster`") from error


def _option(kind: Any, *names: str, **more: Any) -> Any:
    return Annotated[kind, typer.Option(*names, rich_help_panel=_PANEL, **more)]


_ADDRESS = "HOST:PORT, auto (this machine's cluster) or local (one for this command alone)."
_OWN = [
    keyword("ray_address", _option(str, metavar="ADDRESS", help=_ADDRESS), "auto"),
    keyword(
        "cpus_per_rank",
        _option(
            int | None, min=1, help="CPUs and threads of each rank.", show_default="all that fit"
        ),
        None,
    ),
    keyword(
        "placement_timeout",
        _option(float, min=0.0, metavar="SECONDS", help="How long to wait for room."),
        60.0,
    ),
    keyword("replicas", _option(int, min=1, max=64, help="Replicas behind one address."), 1),
    keyword(
        "max_replicas",
        _option(
            int | None,
            max=64,
            help="Start more while calls wait, up to so many.",
            show_default="as many as --replicas",
        ),
        None,
    ),
    keyword(
        "min_replicas",
        _option(
            int | None,
            min=0,
            help="Keep so many while calls are few; 0: none while there is no call.",
            show_default="as many as --replicas",
        ),
        None,
    ),
    keyword(
        "dry_run",
        _option(bool, "--dry-run", help="Print where the ranks would run, and exit."),
        False,
    ),
]
cluster_command.__signature__ = signature(*_OWN, without=ModelsSettings)  # type: ignore[attr-defined]
