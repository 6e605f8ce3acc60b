"""The job synthetic, and what only it needs."""
