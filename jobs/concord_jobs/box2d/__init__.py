"""What the jobs on trajectories of a Box2D simulator share."""
