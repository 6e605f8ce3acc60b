"""The job punctuated-sst2 and its own modules."""
