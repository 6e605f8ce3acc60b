"""The included jobs: each reproduces a part of a paper, or shows a feature of the platform."""
