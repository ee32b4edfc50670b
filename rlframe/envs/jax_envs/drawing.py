"""Draw the images of JAX environments for videos."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

BLACK, GRAY, BLUE, RED = (30, 30, 30), (170, 170, 170), (70, 130, 220), (220, 110, 70)


class Line(NamedTuple):
    """A thick line with round ends."""

    start: Any  # (x, y), with y upward
    end: Any  # (x, y)
    width: float
    color: tuple[int, int, int]


def draw(lines: Iterable[Line], extent: float, size: int = 256) -> np.ndarray:
    """Return an image [size, size, 3] uint8 of lines on white. Both coordinates go from -`extent` to `extent`."""
    axis = np.linspace(-extent, extent, size, dtype=np.float32)
    points = np.stack(np.meshgrid(axis, -axis), axis=-1)
    image = np.full((size, size, 3), 255, np.uint8)
    for line in lines:
        start = np.asarray(line.start, np.float32)
        way = np.asarray(line.end, np.float32) - start
        share = np.clip((points - start) @ way / max(way @ way, 1e-9), 0.0, 1.0)  # of the way, at the nearest point
        distance = np.linalg.norm(points - start - share[..., None] * way, axis=-1)
        image[distance <= line.width / 2] = line.color
    return image
