"""The public interface of Python, which ``concord`` exports, and which the command line calls."""
