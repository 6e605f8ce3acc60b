"""Studies: a restorable search over a job's options on Ray Tune, which states how the best was selected."""
