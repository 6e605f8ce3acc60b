"""The job memorization and its own modules."""
