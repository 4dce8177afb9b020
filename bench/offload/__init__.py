"""What K/V on the disk costs: steps of a large random model, and what a trained model reads."""
