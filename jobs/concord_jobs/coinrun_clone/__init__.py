"""The job coinrun-clone and its own modules."""
