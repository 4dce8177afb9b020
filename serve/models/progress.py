"""How far loading is, for somebody who watches."""

from __future__ import annotations

from collections.abc import Iterable

from serve.models.spec import ModelSpec


def shown(indices: Iterable[int], spec: ModelSpec, progress: bool) -> Iterable[int]:
    """The layers' numbers, drawn as a bar on a terminal while they are taken."""
    if not progress:
        return indices
    from rich.console import Console  # only where somebody watches
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
