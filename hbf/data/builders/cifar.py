"""CIFAR-10 and CIFAR-100 from their binary archives.

Name, version and features equal those of TFDS, so TFDS itself can read the prepared files. TFDS encodes images with
TensorFlow. These builders encode them with Pillow.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds

from hbf.data.builders import base
from hbf.data.images import archives, codec

_SHAPE = (3, 32, 32)  # The archive stores channels first.


class _Cifar(base.FromArchive):
  """A mixin for both CIFAR builders, with the methods that override TFDS's own.

  Attributes:
    records: number of images in each split.
    info: TFDS's description of the data set.
    _cifar_info: TFDS's description of the archive, with the names of its files.
  """

  records: ClassVar[Mapping[str, int]] = {'train': 50_000, 'test': 10_000}

  info: tfds.core.DatasetInfo
  _cifar_info: Any

  def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
    del dl_manager  # The archive is local.
    layout = self._cifar_info
    files = {'train': layout.train_files, 'test': layout.test_files}
    names = [layout.prefix + name for name in (*layout.label_files, *files['train'], *files['test'])]
    contents = archives.read_tar(self._archive, names)
    for key, name in zip(layout.label_keys, layout.label_files, strict=True):
      self.info.features[key].names = self._class_names(key, contents[layout.prefix + name])
    return {
      split: self._generate_examples(split, [self._parse(split, layout.prefix + name, contents) for name in names])
      for split, names in files.items()
    }

  def _class_names(self, key: str, content: bytes) -> list[str]:
    names = [name for name in content.decode(errors='replace').split('\n') if name]
    if len(names) != self.info.features[key].num_classes:
      raise self._archive.error(f'has {len(names)} class names, not {self.info.features[key].num_classes}')
    return names

  def _parse(self, split: str, name: str, contents: Mapping[str, bytes]) -> np.ndarray:
    """Return the records of a file, one for each of its n images, uint8 [n, 1 + 3072] or [n, 2 + 3072].

    A record begins with the class of the image, or for CIFAR-100 with the coarse class and the class. The levels of
    the pixels follow.

    Args:
      split: the split that the file belongs to.
      name: name of the file in the archive.
      contents: content of each file of the archive by name.
    """
    layout = self._cifar_info
    files = layout.train_files if split == 'train' else layout.test_files
    count, width = self.records[split] // len(files), len(layout.label_keys) + np.prod(_SHAPE)
    if len(contents[name]) != count * width:
      raise self._archive.error(f'has {len(contents[name])} bytes in {name}, not {count * width}')
    records = np.frombuffer(contents[name], np.uint8).reshape(count, width)
    for column, key in enumerate(layout.label_keys):
      if records[:, column].max() >= self.info.features[key].num_classes:
        raise self._archive.error(f'has a label in {name} that is not among the classes')
    return records

  def _generate_examples(self, split: str, files: list[np.ndarray]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the index and the features of each example of a split, as TFDS does.

    `files` has the records of each file, from `_parse`.
    """
    keys = self._cifar_info.label_keys
    for number, record in enumerate(record for records in files for record in records):
      image = record[len(keys) :].reshape(_SHAPE).transpose(1, 2, 0)
      labels = {key: int(label) for key, label in zip(keys, record, strict=False)}
      yield number, {'id': f'{split}_{number:05d}', 'image': codec.encode_png(image), **labels}


class Cifar10(_Cifar, tfds.image_classification.Cifar10, skip_registration=True):  # type: ignore[call-arg]
  """A builder of TFDS's CIFAR-10 that reads a local archive without TensorFlow."""


class Cifar100(_Cifar, tfds.image_classification.Cifar100, skip_registration=True):  # type: ignore[call-arg]
  """A builder of TFDS's CIFAR-100 that reads a local archive without TensorFlow."""
