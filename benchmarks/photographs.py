"""Random image files like ImageNet's, prepared as by TFDS."""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from hbf.data.builders.base import Local

WIDTH, HEIGHT = 500, 375  # pixels, the most frequent size in ImageNet
QUALITY = 95
NOISE = 10.2  # gray levels, for files of 110 kB, the mean of ImageNet's
COUNT = 500


class Photographs(Local, tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
  """A TFDS data set of random JPEG files, under ImageNet's name."""

  name = 'imagenet2012'
  VERSION = tfds.core.Version('5.1.0')

  def _info(self) -> tfds.core.DatasetInfo:
    image, label = tfds.features.Image(encoding_format='jpeg'), tfds.features.ClassLabel(num_classes=1000)
    return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({'image': image, 'label': label}))

  def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
    del dl_manager  # Nothing is downloaded.
    return {'train': self._generate_examples(COUNT), 'validation': self._generate_examples(1)}

  def _generate_examples(self, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
    for number in range(count):
      yield number, {'image': photograph(number), 'label': number}


def photograph(seed: int) -> bytes:
  """Return a JPEG file of smooth colors with noise."""
  random = np.random.default_rng(seed)
  coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), np.uint8))
  smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32)
  noisy = smooth + NOISE * random.standard_normal(smooth.shape, np.float32)
  file = io.BytesIO()
  Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, format='JPEG', quality=QUALITY)
  return file.getvalue()


def prepare(directory: str) -> None:
  """Prepare the files in a TFDS data directory."""
  tfds.disable_progress_bar()
  with contextlib.redirect_stdout(io.StringIO()):  # hides TFDS's messages
    Photographs(data_dir=directory, file_format='array_record').download_and_prepare()
