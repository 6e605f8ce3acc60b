"""Studies: a search over a job's options on Ray Tune, restorable, and honest about what selected the best."""
