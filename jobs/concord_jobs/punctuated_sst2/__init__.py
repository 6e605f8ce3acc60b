"""The job punctuated-sst2, and what only it needs."""
