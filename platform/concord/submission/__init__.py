"""Jobs on a Ray cluster: packed, submitted through Ray Jobs, followed, listed and stopped."""

from concord.submission.cluster import Cluster, Submission
from concord.submission.package import Package
from concord.submission.profile import Profile

__all__ = ["Cluster", "Package", "Profile", "Submission"]
