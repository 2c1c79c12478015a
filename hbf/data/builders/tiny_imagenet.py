"""Tiny ImageNet: 200 classes of ImageNet at 64 x 64 pixels, from its official archive.

The labels of the official test images are not public. The official validation images are therefore the test split, as
is usual.
"""

import collections
import io
import posixpath
import zipfile
from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds
from PIL import Image

from hbf.data.builders import base
from hbf.data.images import codec

_ROOT = 'tiny-imagenet-200'
_SIZE = 64


class TinyImagenet(base.FromArchive, tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
  """A builder of Tiny ImageNet. The classes are sorted WordNet ids. The metadata `names` has a word for each id."""

  VERSION = tfds.core.Version('1.0.0')

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description=__doc__,
      features=tfds.features.FeaturesDict(
        {
          'id': tfds.features.Text(),
          'image': tfds.features.Image(shape=(_SIZE, _SIZE, 3)),
          'label': tfds.features.ClassLabel(num_classes=200),
        }
      ),
      supervised_keys=('image', 'label'),
      metadata=tfds.core.MetadataDict(),
      homepage='https://cs231n.stanford.edu/tiny-imagenet-200.zip',
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
    del dl_manager  # The archive is local.
    with self._archive.reading(), zipfile.ZipFile(self._archive.path) as archive:
      classes = sorted(self._read(archive, f'{_ROOT}/wnids.txt').decode().split())
      annotations = self._read(archive, f'{_ROOT}/val/val_annotations.txt').decode()
      members = archive.namelist()
      words = self._read(archive, f'{_ROOT}/words.txt').decode()
    if len(classes) != self.info.features['label'].num_classes:
      raise self._archive.error(f'lists {len(classes)} classes in wnids.txt, not 200')
    self.info.features['label'].names = classes
    self.info.metadata['names'] = _names(classes, words)
    train, test = _train_labels(members), _test_labels(annotations)
    self._require_complete(classes, set(members), train, test)
    return {'train': self._generate_examples(train), 'test': self._generate_examples(test)}

  def _read(self, archive: zipfile.ZipFile, name: str) -> bytes:
    try:
      return archive.read(name)
    except KeyError:
      raise self._archive.error(f'lacks {name}') from None

  def _require_complete(
    self, classes: list[str], members: set[str], train: dict[str, str], test: dict[str, str]
  ) -> None:
    """Raise UserError if a split lacks a class, has an unknown class, or names an image that is not in the archive.

    Args:
      classes: all classes.
      members: paths of all files in the archive.
      train: the class of each training image by its path.
      test: the class of each test image by its path.
    """
    for split, labels in (('train', train), ('val', test)):
      absent = sorted(set(classes) - set(labels.values()))
      unknown = sorted(set(labels.values()) - set(classes))
      missing = sorted(set(labels) - members)
      if absent:
        raise self._archive.error(f'lacks {split} images of {absent[0]}')
      if unknown:
        raise self._archive.error(f'has {split} images of {unknown[0]}, which wnids.txt lacks')
      if missing:
        raise self._archive.error(f'lacks {missing[0]}')

  def _generate_examples(self, labels: dict[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    with self._archive.reading(), zipfile.ZipFile(self._archive.path) as archive:
      for member, label in labels.items():
        name = posixpath.basename(member)
        yield name, {'id': name, 'image': self._rgb(member, archive.read(member)), 'label': label}

  def _rgb(self, member: str, encoded: bytes) -> bytes:
    """Return an encoded image as it is if it is RGB, else converted to RGB and encoded as PNG."""
    try:
      with Image.open(io.BytesIO(encoded)) as image:
        mode, size = image.mode, image.size
      pixels = codec.decode(io.BytesIO(encoded), channels=3, size=None)  # This also finds damage in RGB images.
    except Exception as error:  # Pillow raises errors of any type on damaged data.
      raise self._archive.error(f'has a damaged image {member}') from error
    if size != (_SIZE, _SIZE):
      raise self._archive.error(f'has {size[0]} x {size[1]} pixels in {member}, not {_SIZE} x {_SIZE}')
    return encoded if mode == 'RGB' else codec.encode_png(pixels)


def _train_labels(members: list[str]) -> dict[str, str]:
  """Return the class of each training image by its path in the archive, ROOT/train/CLASS/images/FILE."""
  parts = {member: member.split('/') for member in members}
  return {
    member: part[2]
    for member, part in parts.items()
    if part[:2] == [_ROOT, 'train'] and len(part) == 5 and part[4].lower().endswith('.jpeg')
  }


def _test_labels(annotations: str) -> dict[str, str]:
  """Return the class of each official validation image by its path, from tab-separated lines `FILE CLASS ...`."""
  rows = [line.split('\t') for line in annotations.splitlines() if '\t' in line]
  return {f'{_ROOT}/val/images/{name}': label for name, label, *_ in rows}


def _names(classes: list[str], words: str) -> dict[str, str]:
  """Return the first synonym of each class, from lines `ID SYNONYM, ...`. Add the id if classes share a synonym."""
  synonyms = dict(line.split('\t', 1) for line in words.splitlines() if '\t' in line)
  first = {name: synonyms[name].partition(',')[0] for name in classes if name in synonyms}
  count = collections.Counter(first.values())
  return {name: word if count[word] == 1 else f'{word} ({name})' for name, word in first.items()}
