"""The job distill-life and its own modules."""
