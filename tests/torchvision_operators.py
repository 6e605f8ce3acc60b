"""Declares the operators that importing torchvision needs, if torchvision was compiled for another torch.

Torchvision's networks and augmentation need none of them. Transformers imports torchvision with its models.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

_spec = find_spec("torchvision")
LIBRARY: torch.library.Library | None = None  # kept: deleting the object removes the declarations
if _spec is not None and _spec.origin is not None:
    try:
        for file in Path(_spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(file))
    except OSError:
        LIBRARY = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
