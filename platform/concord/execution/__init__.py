"""A run's life: its workers (Ray Train's or this machine's), its folder and lock, resuming, progress, submission."""
