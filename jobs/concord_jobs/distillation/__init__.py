"""The common part of the jobs with a teacher."""
