"""The job irm-regression and its own modules."""
