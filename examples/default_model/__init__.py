"""The parts of train_default_model.py: corpus, data, model, optimizer, evaluation, export."""
