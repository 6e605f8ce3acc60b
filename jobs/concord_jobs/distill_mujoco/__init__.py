"""The job distill-mujoco, and what only it needs."""
