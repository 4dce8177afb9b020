"""The file that keeps what a LearnedPredictor has learned, in the safetensors format.

It holds sums and past lengths of all clients together: no prompt, no answer and no client's name.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from serve.errors import ConfigError
from serve.prediction.learned import LearnedPredictor

logger = logging.getLogger(__name__)

SAVE_EVERY_S = 300.0
_MAX_BYTES = 4 << 20
_FORMAT = "mergestep-lengths-1"


class PredictorFile:
    """Loads a predictor from a file at once, and saves it now and then and at the end.

    model: names the model whose hidden states were learned from."""

    def __init__(self, path: Path, predictor: LearnedPredictor, model: str) -> None:
        """Raises ConfigError if the file exists but is not one of this model."""
        self._path, self._predictor, self._model = path, predictor, model
        if path.exists():
            restore(path, predictor, model)
            logger.info("lengths of answers are predicted as %s has it", path)
        elif not path.parent.is_dir():
            raise ConfigError(f"length_predictor_file: {path.parent} is not a directory")
        self._num_saved = predictor.num_learned
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="save-lengths", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Saves once more. Idempotent; the predictor learns no more."""
        if not self._is_stopped.is_set():
            self._is_stopped.set()
            self._thread.join()
            self._save()

    def _run(self) -> None:
        while not self._is_stopped.wait(SAVE_EVERY_S):
            self._save()

    def _save(self) -> None:
        num_learned = self._predictor.num_learned
        if num_learned == self._num_saved:
            return
        content = save(self._predictor.state() | {"format": _bytes(f"{_FORMAT} {self._model}")})
        partial = self._path.with_name(self._path.name + ".new")
        try:
            partial.write_bytes(content)
            os.replace(partial, self._path)
        except OSError as error:
            logger.warning("length_predictor_file: %s", error)
            return
        self._num_saved = num_learned


def restore(path: Path, predictor: LearnedPredictor, model: str) -> None:
    """Restores a new predictor. Raises ConfigError if the file is not one of this model."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ValueError(f"it is larger than {_MAX_BYTES} bytes")
        arrays = load(content)
        _check_format(arrays.pop("format", None), model)
        _check_shapes(arrays, predictor.state())
        predictor.restore(arrays)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(f"length_predictor_file {path}: {error}") from error


def _bytes(text: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(text.encode(), np.uint8)


def _check_format(found: Any, model: str) -> None:
    text = b"" if found is None or found.dtype != np.uint8 else found.tobytes()
    kind, _, of = text.partition(b" ")
    if kind != _FORMAT.encode():
        raise ValueError("it is not a file of learned lengths")
    if of != model.encode():
        raise ValueError("it was learned with another model; each needs a file of its own")


def _check_shapes(arrays: dict[str, Any], like: dict[str, Any]) -> None:
    """Raises ValueError unless the arrays have the names, types and shapes of a predictor's state;
    past lengths may be fewer."""
    if set(arrays) != set(like):
        raise ValueError("it holds other arrays than a predictor has")
    for name, wanted in like.items():
        array = arrays[name]
        is_alike = array.dtype == wanted.dtype and array.ndim == wanted.ndim
        if not is_alike or (wanted.size and array.shape != wanted.shape):
            raise ValueError(f"{name} has another type or shape")
