"""The job label-noise, and what only it needs."""
