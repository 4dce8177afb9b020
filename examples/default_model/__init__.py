"""Helpers of examples/train_default_model.py: model, data, optimizer, evaluation, export."""
