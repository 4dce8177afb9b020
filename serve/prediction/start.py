"""Chooses what predicts lengths, as the settings say."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from serve.config import EngineConfig
from serve.length_predictor import LengthPredictor
from serve.prediction.hidden_reader import HiddenReader
from serve.prediction.learned import LearnedPredictor
from serve.prediction.saved import PredictorFile
from serve.scheduler.length_predictor import SequencePredictor


class Prediction(NamedTuple):
    """What an engine predicts lengths with. predictor: for make_policy. reader: for the runner;
    None if no hidden state is read. file: to be closed after the last step."""

    predictor: LengthPredictor | SequencePredictor | None
    reader: HiddenReader | None = None
    file: PredictorFile | None = None


def start_prediction(config: EngineConfig, hidden_size: int, model: str) -> Prediction:
    """Returns what the settings ask for. model: names the model in a file of learned lengths.

    Raises ConfigError if that file is not one of this model."""
    chosen = config.length_predictor
    if not isinstance(chosen, str):
        return Prediction(chosen)
    path = config.length_predictor_file
    # admission alone gains too little from it to pay for it with small models
    is_learned = chosen == "learned" or (
        chosen == "auto" and (config.order == "srpt" or path is not None)
    )
    if not is_learned or config.memory_policy != "predicted":
        return Prediction(None)
    predictor = LearnedPredictor()
    file = None if path is None else PredictorFile(Path(path), predictor, model)
    return Prediction(predictor, HiddenReader(hidden_size), file)
