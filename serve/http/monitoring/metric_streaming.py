"""The metrics of weights and of K/V that steps read from the disk."""

from __future__ import annotations

from serve.http.monitoring.metric_spec import MetricSources, MetricSpec, Sampled, by


def _of(sources: MetricSources, name: str) -> float | None:
    return None if sources.streaming is None else sources.streaming[name]


def _problems(sources: MetricSources) -> Sampled:
    found = sources.streaming
    return [] if found is None else by({kind: found[kind] for kind in ("repeated", "failed")})


def _experts(sources: MetricSources) -> Sampled:
    found = sources.streaming
    if found is None:
        return []
    names = {"hit": "expert_hits", "late": "expert_late", "miss": "expert_misses"}
    return by({label: found[name] for label, name in names.items()})


def _kv(sources: MetricSources, name: str) -> float | None:
    return None if sources.offload is None else sources.offload[name]


def _units(sources: MetricSources) -> Sampled:
    found = sources.offload
    if found is None:
        return []
    held, coming = found["units_held"], found["units_coming"]
    return by({"memory": held, "coming": coming, "disk": found["units_read"] - held - coming})


def _moved(sources: MetricSources) -> Sampled:
    found = sources.offload
    kinds = ("fetched", "ahead", "ahead_used", "written")
    return [] if found is None else by({kind: found[f"{kind}_bytes"] for kind in kinds})


STREAMING = (
    MetricSpec("gauge", "weights_resident_bytes",
               "Memory of weights of which the rest is on the disk, or beside a GPU, with buffers.",
               lambda r: _of(r, "resident_bytes")),
    MetricSpec("counter", "weights_read_bytes",
               "Bytes of weights read from the disk, or copied to a GPU, for steps.",
               lambda r: _of(r, "read_bytes")),
    MetricSpec("counter", "weights_stalled_seconds", "Seconds that steps waited for weights.",
               lambda r: _of(r, "stalled_s")),
    MetricSpec("counter", "weights_read_problems", "Pieces of weights that were read again, and"
               " those that could not be read.", _problems, ("kind",)),
    MetricSpec("counter", "weights_expert_uses", "Experts that steps used: in memory, on their way"
               " since they were guessed, or on the disk; beside a GPU: there, copied to it for"
               " many rows, or computed by the CPU.", _experts, ("found",)),
    MetricSpec("counter", "weights_expert_guesses", "Experts read ahead for the next layer.",
               lambda r: _of(r, "expert_guesses")),
    MetricSpec("counter", "weights_expert_guesses_used", "Those of them that it used.",
               lambda r: _of(r, "expert_used_guesses")),
    MetricSpec("gauge", "kv_offload_resident_bytes",
               "Memory of K/V of which the rest is on the disk, without bounds.",
               lambda r: _kv(r, "resident_bytes")),
    MetricSpec("counter", "kv_offload_units",
               "Layers of 16 tokens of K/V that steps asked for: in memory, coming since they were"
               " fetched ahead, or on the disk.", _units, ("found",)),
    MetricSpec("counter", "kv_offload_moved_bytes",
               "Bytes of K/V fetched from the disk, those of them that were fetched ahead, those of"
               " these that were then used, and those written.", _moved, ("kind",)),
    MetricSpec("counter", "kv_offload_waited_seconds", "Seconds that steps waited for K/V.",
               lambda r: _kv(r, "waited_s")),
)  # fmt: skip
