"""Pictures: `plt` is Matplotlib's pyplot without a display, and `write_png` writes a figure."""

import pathlib
from typing import Any

import matplotlib

from hbf.training.workdir import replacing

matplotlib.use('Agg')
import matplotlib.pyplot as plt


def write_png(figure: Any, path: pathlib.Path, dpi: int = 110) -> None:
  """Write a figure of `plt` as a PNG, and close it. A file at `path` is replaced in one step.

  Raises:
    UserError: the file cannot be written.
  """
  with replacing(path) as file:
    figure.savefig(file, format='png', dpi=dpi, metadata={'Software': None})
  plt.close(figure)
