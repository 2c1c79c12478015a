"""The handwritten digits that come with scikit-learn: 1,797 gray images of 8 x 8 pixels, 10 classes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from hbf.data.builders import base
from hbf.data.images import codec

_TEST_EVERY = 5


class Digits(base.Local, tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
  """A builder of the digits: the test set of UCI's "Optical recognition of handwritten digits".

  The split `train` has four fifths of the images. The split `test` has the other images.
  """

  VERSION = tfds.core.Version('1.0.0')

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description=__doc__,
      features=tfds.features.FeaturesDict(
        {
          'image': tfds.features.Image(shape=(8, 8, 1)),
          'label': tfds.features.ClassLabel(names=[str(digit) for digit in range(10)]),
        }
      ),
      supervised_keys=('image', 'label'),
      homepage='https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits',
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
    del dl_manager  # The images come with scikit-learn.
    from sklearn.datasets import load_digits  # takes a second, and at the top every command would wait for it

    digits = load_digits()
    is_test = np.zeros(len(digits.target), bool)
    for digit in range(10):  # Every class gives the same share to the test split.
      is_test[np.flatnonzero(digits.target == digit)[_TEST_EVERY - 1 :: _TEST_EVERY]] = True
    return {
      'train': self._generate_examples(digits, np.flatnonzero(~is_test)),
      'test': self._generate_examples(digits, np.flatnonzero(is_test)),
    }

  def _generate_examples(self, digits: Any, rows: np.ndarray) -> Iterator[tuple[int, dict[str, Any]]]:
    levels = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    for row in rows.tolist():
      yield row, {'image': codec.encode_png(levels[row]), 'label': int(digits.target[row])}
