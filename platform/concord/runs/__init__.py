"""The life of a run: Ray session and Ray Train, its folder and who has it, resuming, progress, what is registered."""
