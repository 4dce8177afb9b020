"""Predicts the lengths of answers from what a request shows: its prompt's last tokens and, once the
prompt is computed, the model's own hidden state.

It owns the features, the online regression on them and the file that keeps what was learned. The
scheduler sees it as a SequencePredictor (serve/scheduler/length_predictor.py).
"""
