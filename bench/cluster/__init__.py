"""Measurements of several servers side by side: what breaks, and what clients see of it."""
