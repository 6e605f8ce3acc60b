"""What the jobs with a teacher share."""
