"""A source in a module of its own name, as worker processes import it (there are two called conftest)."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class ArraySource:
  """A source in memory."""

  images: np.ndarray
  labels: np.ndarray

  def __len__(self):
    return len(self.images)

  def __getitem__(self, index):
    return self.images[index], int(self.labels[index])
