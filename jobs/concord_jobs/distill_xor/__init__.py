"""The job distill-xor and its own modules."""
