"""The job distill-life, and what only it needs."""
