"""The job funnel-board and its own modules."""
