"""The job distill-xor, and what only it needs."""
