"""The life of a run: its workers (Ray Train's or this machine's), its folder and lock, resuming, progress."""
