"""Where K and V live, and where attention runs."""
