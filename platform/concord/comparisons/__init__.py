"""Comparisons: named configurations × seeds on the engine of the studies, and a table beside a paper's."""
