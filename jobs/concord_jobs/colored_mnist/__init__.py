"""The job colored-mnist, and what only it needs."""
