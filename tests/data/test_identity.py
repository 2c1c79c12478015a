import json
import os
import shutil

import numpy as np
import pytest
from PIL import Image

from hbf.data.datasets import Dataset, load
from hbf.data.images import codec
from hbf.data.pipeline.identity import identity


def _make_folder(root, seed=0, classes=('cat', 'dog')):
  generator = np.random.default_rng(seed)
  for split in ('train', 'test'):
    for name in classes:
      (root / split / name).mkdir(parents=True)
      for number in range(3):
        image = Image.fromarray(generator.integers(0, 256, (12, 12, 3), np.uint8))
        image.save(root / split / name / f'{number}.bmp')  # Uncompressed files all have the same size.
  return root


def _identify(root, size=8):
  return identity(load(name='image_folder', dir='', root=str(root), image_size=size, download=False))


def _identify_prepared(directory, size=0):
  return identity(load(name='digits', dir=str(directory), root='', image_size=size, download=False))


def test_it_says_what_a_data_set_holds_and_is_json(digits_dir):
  found = _identify_prepared(digits_dir)
  assert json.loads(json.dumps(found)) == found
  assert (found['name'], found['classes'], found['image_shape']) == ('digits', list('0123456789'), [8, 8, 1])
  assert found['splits'] == {'train': 1442, 'test': 355}


def test_data_that_were_moved_are_the_same(tmp_path, digits_dir):
  folder = _make_folder(tmp_path / 'a')
  before = _identify(folder)
  shutil.copytree(folder, tmp_path / 'deep' / 'b', copy_function=shutil.copyfile)
  for path in (tmp_path / 'deep' / 'b').rglob('*.bmp'):
    os.utime(path, (0, 0))
  assert _identify(tmp_path / 'deep' / 'b') == before
  shutil.copytree(digits_dir, tmp_path / 'tfds')
  assert _identify_prepared(tmp_path / 'tfds') == _identify_prepared(digits_dir)


def test_the_size_that_images_are_brought_to_is_no_part_of_the_fingerprint(tmp_path, digits_dir):
  folder = _make_folder(tmp_path / 'a')
  assert _identify(folder, 8)['fingerprint'] == _identify(folder, 5)['fingerprint']
  assert _identify_prepared(digits_dir)['fingerprint'] == _identify_prepared(digits_dir, 5)['fingerprint']


def _replace(path, pixels):
  Image.fromarray(pixels).save(path)


@pytest.mark.parametrize(
  'change',
  [
    lambda root: _replace(root / 'test/cat/1.bmp', np.zeros((12, 12, 3), np.uint8)),
    lambda root: (root / 'train/dog/1.bmp').rename(root / 'train/dog/11.bmp'),
    lambda root: (root / 'train/dog/1.bmp').rename(root / 'train/cat/11.bmp'),
    lambda root: [(root / split / 'cat').rename(root / split / 'cow') for split in ('train', 'test')],
  ],
)
def test_other_images_names_or_classes_are_other_data(change, tmp_path):
  folder = _make_folder(tmp_path / 'a')
  before = _identify(folder)['fingerprint']
  change(folder)
  assert _identify(folder)['fingerprint'] != before


def test_a_change_of_size_shows_in_files_that_are_not_sampled(tmp_path, monkeypatch):
  monkeypatch.setattr('hbf.data.pipeline.identity._SAMPLED', 1)
  folder = _make_folder(tmp_path / 'a')
  before = _identify(folder)
  _replace(folder / 'train/dog/2.bmp', np.zeros((13, 13, 3), np.uint8))
  assert _identify(folder) != before


def test_how_a_png_was_packed_does_not_matter(tmp_path):
  folder, pixels = _make_folder(tmp_path / 'a'), np.arange(432, dtype=np.uint8).reshape(12, 12, 3)
  digests = []
  for level in (0, 9):
    Image.fromarray(pixels).save(folder / 'x.png', compress_level=level)
    digests.append(codec.content((folder / 'x.png').read_bytes(), 3))
  assert digests[0] == digests[1] == pixels.tobytes()


@pytest.mark.parametrize('what', ['image', 'label', 'class'])
def test_a_source_in_memory_is_known_by_its_examples(what, make_source):
  def make(change=False):
    source, classes = make_source(20), list('abcdefghij')
    if change and what == 'image':
      source.images[7, 0, 0, 0] ^= 1
    if change and what == 'label':
      source.labels[7] ^= 1
    if change and what == 'class':
      classes[3] = 'x'
    return identity(Dataset('own', tuple(classes), (4, 6, 3), {'train': source, 'test': make_source(5)}))

  assert make() == make()
  assert make()['fingerprint'] != make(change=True)['fingerprint']
