"""The job coinrun-clone, and what only it needs."""
