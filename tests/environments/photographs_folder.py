"""A small folder of images, ``DOMAIN/CLASS/IMAGE``."""

from pathlib import Path

import numpy as np
from PIL import Image

DOMAINS, CLASSES = ("dawn", "day", "night"), ("cat", "dog")


def write_photographs(folder: Path, each: int = 12, size: int = 12, ending: str = "png") -> Path:
    """Write images of noise, brighter for a dog."""
    draw = np.random.default_rng(0)
    for domain in DOMAINS:
        for number, name in enumerate(CLASSES):
            (folder / domain / name).mkdir(parents=True)
            for at in range(each):
                pixels = draw.integers(100 * number, 100 * number + 150, (size, size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / domain / name / f"{at:02}.{ending}")
    return folder
