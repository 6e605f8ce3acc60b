"""The job irm-regression, and what only it needs."""
