"""Helpers of train_default_model.py: model, data, optimizer, greedy answers, evaluation."""
