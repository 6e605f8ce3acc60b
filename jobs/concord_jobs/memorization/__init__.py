"""The job memorization, and what only it needs."""
