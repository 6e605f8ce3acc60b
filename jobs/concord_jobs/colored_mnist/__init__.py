"""The job colored-mnist and its own modules."""
