"""The job synthetic and its own modules."""
