"""The job label-noise and its own modules."""
