"""The life of a run: its workers, by Ray Train or of this machine, its folder and who has it, resuming, progress."""
