"""The hop before equal replicas: it keeps the tokens of each stream, and goes on elsewhere."""
