"""Tiny Shakespeare from its official file, without TensorFlow.

Name, version, features and splits equal those of TFDS: the first 90% are train, the next 5% validation, the last 5%
test.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds

from hbf.data.builders import base

_CHARACTERS = 1_115_394


class TinyShakespeare(base.FromArchive, tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
  """A builder of forty thousand lines of Shakespeare's plays, collected by Karpathy (2015)."""

  VERSION = tfds.core.Version('1.0.0')

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description=__doc__,
      features=tfds.features.FeaturesDict({'text': tfds.features.Text()}),
      homepage='https://github.com/karpathy/char-rnn/blob/master/data/tinyshakespeare/input.txt',
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
    del dl_manager  # The file is local.
    with self._archive.reading(), open(self._archive.path, 'rb') as file:
      text = file.read()
    if len(text) != _CHARACTERS or not text.isascii():
      raise self._archive.error(f'has {len(text):,} bytes, not {_CHARACTERS:,} of ASCII')
    first = int(len(text) * 0.9)
    rest = text[first:]
    second = int(len(rest) * 0.5)
    parts = {'train': text[:first], 'validation': rest[:second], 'test': rest[second:]}
    return {split: self._generate_examples(split, part) for split, part in parts.items()}

  def _generate_examples(self, split: str, text: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    yield split, {'text': text.decode()}
