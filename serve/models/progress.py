"""A progress bar for loading."""

from __future__ import annotations

from collections.abc import Iterable

from serve.models.spec import ModelSpec


def with_progress(indices: Iterable[int], spec: ModelSpec, progress: bool) -> Iterable[int]:
    """Returns indices, with a progress bar on a terminal while they are consumed."""
    if not progress:
        return indices
    from rich.console import Console  # only imported if progress is shown
    from rich.progress import track

    console = Console(stderr=True)
    return track(
        indices,
        description=f"loading {spec.model_type}",
        total=spec.num_layers,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
