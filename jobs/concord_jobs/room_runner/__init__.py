"""The job room-runner, and what only it needs."""
