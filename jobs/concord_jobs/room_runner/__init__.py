"""The job room-runner and its own modules."""
