"""Which columns of a table hold: their relation with the target, and their use by a model, by environment."""
