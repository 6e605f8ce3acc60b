"""The job distill-logits, and what only it needs."""
