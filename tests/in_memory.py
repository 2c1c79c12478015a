"""A source in a module of its own name, as worker processes import it (there are two called conftest)."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class ArraySource:
  """A source of images and labels in memory."""

  images: np.ndarray
  labels: np.ndarray

  def __len__(self):
    return len(self.images)

  def __getitem__(self, index):
    return self.images[index], int(self.labels[index])


def random_source(examples=50, shape=(4, 6, 3), seed=0, classes=10):
  """Return a source of random images and labels."""
  generator = np.random.default_rng(seed)
  images = generator.integers(0, 256, (examples, *shape), dtype=np.uint8)
  return ArraySource(images, generator.integers(0, classes, examples))
