"""The jobs that come with Concord: each reproduces a paper's part, or shows what the platform does."""
