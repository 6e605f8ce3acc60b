"""Jobs on a Ray cluster: packed, submitted through Ray Jobs, followed, listed and stopped."""
