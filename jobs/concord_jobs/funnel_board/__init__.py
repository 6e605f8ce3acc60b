"""The job funnel-board, and what only it needs."""
