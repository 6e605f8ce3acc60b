"""The defaults of columns of text; a module of its own, since help imports neither pandas nor PyTorch."""

TEXT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
TEXT_LENGTH = 128  # tokens
