"""The identity of a data set: facts and a fingerprint that do not depend on the location of the data."""

import hashlib
from typing import Any

from hbf.data.images import sources
from hbf.data.images.dataset import Dataset
from hbf.data.images.targets import CLASSES
from hbf.data.pipeline import order

_SAMPLED = 64  # images of a split in the fingerprint. Reading all images takes as long as an epoch.


def identity(dataset: Dataset) -> dict[str, Any]:
  """Return the identity of a data set, for JSON.

  The fingerprint depends neither on the location of the data nor on the size that images are resized to. It covers at
  most 64 stored images of each split, which are evenly spaced.

  Args:
    dataset: the data set, from `hbf.data.datasets.load`.

  Returns:
    A dict. `name` is the data set's name. `classes` has the stored name of each class, label or value. `names` has
    readable names by stored name. `targets` is the kind of the targets, if they are not classes. `image_shape` is
    height, width and channels. `splits` has the number of examples of each split. `fingerprint` is the SHA-256 of
    `classes`, targets and images, in hexadecimal. It does not cover `names`.

  Raises:
    UserError: an image can't be read.
  """
  return {
    'name': dataset.name,
    'classes': list(dataset.classes),
    'names': dict(dataset.names),
    **({'targets': dataset.targets} if dataset.targets != CLASSES else {}),
    'image_shape': list(dataset.image_shape),
    'splits': {split: len(source) for split, source in dataset.splits.items()},
    'fingerprint': _fingerprint(dataset),
  }


def _fingerprint(dataset: Dataset) -> str:
  parts = [name.encode() for name in dataset.classes]
  for split, source in sorted(dataset.splits.items()):
    sample = order.evenly_spaced(len(source), _SAMPLED)
    parts += [split.encode(), str(len(source)).encode(), *sources.fingerprint_parts(source, sample)]
  # Hash each part first: other parts could have the same concatenation.
  return hashlib.sha256(b''.join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
