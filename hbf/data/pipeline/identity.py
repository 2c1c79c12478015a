"""Fingerprints of data sets: facts that are the same wherever the data lie, and differ for other data."""

import hashlib
from typing import Any

from hbf.data.datasets import Dataset
from hbf.data.images import sources
from hbf.data.images.sources import Source
from hbf.data.pipeline import order

_SAMPLED = 64  # Examples of a split whose images count. All would take as long as an epoch.


def identity(dataset: Dataset) -> dict[str, Any]:
  """Return facts that tell a data set from others, for JSON.

  The location of the data and the size that images are brought to do not change the fingerprint. It covers some
  dozens of images of each split, evenly spaced, as they are stored.

  Args:
    dataset: the result of `hbf.data.datasets.load`.

  Returns:
    name; classes, as they are stored; names, the words shown for classes, which are no part of the fingerprint;
    image_shape: height, width and channels; splits: number of examples of each; fingerprint: SHA-256 of classes,
      labels
    and images, in hexadecimal.

  Raises:
    UserError: an image cannot be read.
  """
  return {
    'name': dataset.name,
    'classes': list(dataset.classes),
    'names': dict(dataset.names),
    'image_shape': list(dataset.image_shape),
    'splits': {split: len(source) for split, source in dataset.splits.items()},
    'fingerprint': _fingerprint(dataset),
  }


def _fingerprint(dataset: Dataset) -> str:
  parts = [name.encode() for name in dataset.classes]
  for split, source in sorted(dataset.splits.items()):
    parts += [split.encode(), str(len(source)).encode(), *_traits(source)]
  # The digest of each part, since parts one after another could be cut elsewhere.
  return hashlib.sha256(b''.join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _traits(source: Source) -> list[bytes]:
  return list(sources.traits(source, order.evenly_spaced(len(source), _SAMPLED)))
