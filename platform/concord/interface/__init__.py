"""The public interface of Python, which ``concord`` exports, and which the command line calls."""

from concord.errors import require_posix

require_posix()
