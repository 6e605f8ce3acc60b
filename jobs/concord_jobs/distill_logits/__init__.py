"""The job distill-logits and its own modules."""
