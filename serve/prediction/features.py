"""The numbers from which the remaining length is predicted when hidden states are known.

Beside a count sketch (Charikar, Chen, Farach-Colton, 2002) of the hidden state of the row that
gives the next token they have the lengths of the prompt and of the answer so far, what past answers
say, and what was predicted when the request arrived.
"""

from __future__ import annotations

from math import log

import numpy as np

from serve.prediction.regression import MAX_FEATURE, Floats, bounded

SKETCH_SIZE = 64
_NUM_COMMON = 5
NUM_FEATURES = _NUM_COMMON + SKETCH_SIZE
_EARLIER = 3  # where earlier predictions begin
_SCALE = 0.25  # brings logarithms of lengths to about the size of the other features


def state_features(sketch: Floats, num_prompt: int, num_output: int) -> Floats:
    """Returns [NUM_FEATURES] of a sequence with num_output tokens, without earlier predictions.
    sketch: [SKETCH_SIZE], that of its hidden state."""
    features = np.zeros(NUM_FEATURES)
    features[:_EARLIER] = 1.0, _SCALE * log(1 + num_prompt), _SCALE * log(1 + num_output)
    features[_NUM_COMMON:] = sketch
    return bounded(features, MAX_FEATURE)


def set_earlier(features: Floats, past_tokens: float, arrived: float) -> None:
    """Writes the median of the remaining tokens that past answers say, and the logarithm that was
    predicted on arrival."""
    features[_EARLIER:_NUM_COMMON] = _SCALE * log(past_tokens), _SCALE * arrived
