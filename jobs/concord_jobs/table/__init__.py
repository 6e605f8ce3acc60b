"""The job table and its own modules."""
