"""The common part of the jobs on trajectories of a Box2D simulator."""
