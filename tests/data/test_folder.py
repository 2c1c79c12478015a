import os
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from configs import image_folder
from hbf.data.datasets import load
from hbf.data.images import sources
from hbf.data.images.sources import hold_out
from hbf.data.pipeline.inputs import make_input
from hbf.errors import Notice, UserError
from hbf.tasks.registry import make_task


def _save(path, pixels):
  path.parent.mkdir(parents=True, exist_ok=True)
  Image.fromarray(pixels).save(path)


@pytest.fixture
def root(tmp_path):
  """Return a folder of images in several formats and sizes, with hidden files. Class `fish` has no test image."""
  generator = np.random.default_rng(0)
  folder = tmp_path / 'images'
  for name in ('train/dog/a.png', 'train/dog/b.jpg', 'train/cat/c.bmp', 'train/fish/d.webp', 'test/cat/e.gif'):
    _save(folder / name, generator.integers(0, 256, (20, 30, 3), np.uint8))
  _save(folder / 'test/dog/gray.png', generator.integers(0, 256, (8, 8), np.uint8))
  (folder / 'train/dog/.DS_Store').write_text('hidden')
  (folder / 'train/.cache').mkdir()
  return folder


def _load(root, image_size=8):
  return load(name='image_folder', dir='', root=str(root), image_size=image_size, download=False)


def test_classes_labels_and_shapes(root, offline):
  data = _load(root)
  assert data.classes == ('cat', 'dog', 'fish') and data.image_shape == (8, 8, 3)
  assert [data.splits['train'][i][1] for i in range(len(data.splits['train']))] == [0, 1, 1, 2]
  assert [data.splits['test'][i][1] for i in range(len(data.splits['test']))] == [0, 1]
  for source in data.splits.values():
    for index in range(len(source)):
      assert source[index][0].shape == (8, 8, 3) and source[index][0].dtype == np.uint8


def _with_validation(root, **splits):
  return load(name='image_folder', dir='', root=str(root), image_size=8, download=False, **splits)


def test_a_validation_split_of_ones_own_replaces_the_held_out_part(root):
  shutil.copytree(root / 'test', root / 'val')
  data = _with_validation(root, validation_split='val')
  config = image_folder.get_config()
  config.data.update(root=str(root), image_size=8, validation=0.25, validation_split='val')
  config.data.transforms = (('alternate_flip',),)
  task = make_task(config, data)
  splits = task.splits(config.data.validation)
  assert [task._time(step, 2)[1].tolist() for step in (1, 2)] == [[0, 0], [1, 1]]  # an epoch has all of train
  assert {name: len(source) for name, source in splits.items()} == {'train': 4, 'validation': 2, 'test': 2}
  np.testing.assert_array_equal(splits['validation'][1][0], data.splits['test'][1][0])
  config.data.validation_split = ''
  splits = make_task(config, _load(root)).splits(0.25)
  assert {name: len(source) for name, source in splits.items()} == {'train': 3, 'validation': 1, 'test': 2}


@pytest.mark.parametrize(('splits', 'message'), [
  ({'validation_split': 'train'}, "data.validation_split 'train' has train, which the run also trains on"),
  ({'validation_split': 'test'}, "'test' has test, which the run also tests on: set it to another split"),
  ({'validation_split': 'vall'}, 'images/vall does not exist.*set data.validation_split to the name of'),
  ({'validation_split': 'linked'}, 'test is the same folder as|linked is the same folder as'),
  ({'validation_split': 'val'}, 'images/val/bird is a class that train/ lacks'),
])  # fmt: skip
def test_a_validation_split_that_cannot_be_used_is_refused(root, splits, message):
  shutil.copytree(root / 'test', root / 'val')
  (root / 'val' / 'dog').rename(root / 'val' / 'bird')
  (root / 'linked').symlink_to(root / 'test')
  with pytest.raises(UserError, match=message):
    _with_validation(root, **splits)


def test_data_without_such_a_split_are_refused(root):
  config = image_folder.get_config()
  config.data.update(root=str(root), image_size=8, validation_split='val')
  with pytest.raises(UserError, match=r'data.validation_split is val, and image_folder has train and test only'):
    make_task(config, _load(root))


def test_labels_are_known_without_reading_images(root):
  _empty_files(root / 'train/dog')
  assert sources.labels(_load(root).splits['train']).tolist() == [0, 1, 1, 2]


def test_an_image_of_the_right_size_is_exact_and_gray_becomes_rgb(root):
  image, _ = _load(root).splits['test'][1]
  with Image.open(root / 'test/dog/gray.png') as original:
    np.testing.assert_array_equal(image, np.repeat(np.asarray(original)[..., None], 3, axis=-1))


def test_the_center_is_kept(tmp_path):
  pixels = np.zeros((10, 40, 3), np.uint8)
  pixels[:, 15:25] = 255
  for split in ('train', 'test'):
    _save(tmp_path / split / 'a' / 'wide.png', pixels)
    _save(tmp_path / split / 'b' / 'tall.png', pixels.swapaxes(0, 1))
  source = _load(tmp_path, 10).splits['train']
  assert all((source[index][0] == 255).all() for index in (0, 1))
  small = _load(tmp_path, 5).splits['train'][0][0]
  assert small.shape == (5, 5, 3) and small[1:4, 1:4].min() == 255


def _empty(folder):
  for path in folder.iterdir():
    path.unlink()


def _empty_files(folder):
  for path in folder.iterdir():
    path.write_bytes(b'')


@pytest.mark.parametrize(
  ('damage', 'message'),
  [
    (lambda root: root.rename(root.parent / 'moved'), r"folder '\S+images' does not exist.*data.root.*--data_root"),
    (lambda root: (root / 'train').rename(root / 'training'), r'images/train does not exist'),
    (
      lambda root: (root / 'test').rename(root / 'val'),
      r'images/test does not exist.* train, val: .*data.test_split',
    ),
    (lambda root: (root / 'test').rename(root / 'old') and (root / 'test').mkdir(), 'test has no folder in it'),
    (lambda root: _empty(root / 'train/fish'), 'train/fish has no image in it'),
    (lambda root: _empty(root / 'test/cat'), 'test/cat has no image in it'),
    (lambda root: (root / 'test/bird').mkdir(), 'test/bird is a class that train/ lacks'),
    (lambda root: (root / 'train/dog/puppy').mkdir(), 'train/dog/puppy is a folder within a class'),
    (lambda root: (root / 'train/dog/x').symlink_to('nowhere'), 'train/dog/x is neither a file nor a folder'),
    (lambda root: (root / 'train/x').symlink_to('nowhere'), 'train/x is neither a file nor a folder'),
    (lambda root: (root / 'train/dog' / os.fsdecode(b'\xff')).touch(), r'train/dog/\\xff has a name that is'),
    (lambda root: (root / 'train' / os.fsdecode(b'\xff')).mkdir(), r'train/\\xff has a name that is not UTF-8'),
    (
      lambda root: shutil.rmtree(root / 'test') or (root / 'test').symlink_to('train'),
      r'images/test is the same folder as \S+train;',
    ),
    (
      lambda root: [shutil.rmtree(root / name) for name in ('train/cat', 'train/fish', 'test/cat')],
      'images has one class only, dog;',
    ),
  ],
)
def test_a_wrong_layout_is_refused(root, damage, message):
  damage(root)
  with pytest.raises(UserError, match=message) as caught:
    _load(root)
  assert '; expected' in str(caught.value) and '\n' not in str(caught.value)


def test_what_is_trained_on_is_not_tested_on(root):
  with pytest.raises(UserError, match=r"data\.test_split is 'train'; expected"):
    load(name='image_folder', dir='', root=str(root), image_size=8, download=False, test_split='train')


def test_what_is_not_used_is_said(root):
  (root / 'val').mkdir()
  (root / 'train/labels.csv').touch()
  with pytest.warns(Notice) as caught:
    _load(root)
  first, second = (str(warning.message) for warning in caught)
  assert re.search(r'images/val is not used: the run trains on train/.* and tests on test/', first)
  assert re.search(
    r'images/train has files outside the class folders, which are not used: 1, such as labels\.csv', second
  )


def test_the_folder_to_test_on_can_have_another_name(root):
  before = _load(root)
  (root / 'test').rename(root / 'val')
  after = load(name='image_folder', dir='', root=str(root), image_size=8, download=False, test_split='val')
  assert after.splits.keys() == before.splits.keys() and after.splits['train'] == before.splits['train']
  assert after.splits['test'].labels == before.splits['test'].labels


def test_root_and_size_are_needed(root):
  with pytest.raises(UserError, match=r'has \d+×\d+ pixels and the first image has .* set data\.image_size'):
    sources.check(_load(root, 0).splits['test'], np.arange(2))
  with pytest.raises(UserError, match=r'set data\.root'):
    _load('')


@pytest.mark.parametrize('kind', ['device', 'stream'])
@pytest.mark.parametrize('name', ['train/dog/a.png', 'train/dog/b.jpg', 'train/fish/d.webp'])
def test_a_damaged_image_is_found_before_the_first_batch(root, sharding, kind, name):
  content = (root / name).read_bytes()
  for damaged in (b'', b'no image', content[: len(content) * 3 // 4]):
    (root / name).write_bytes(damaged)
    with pytest.raises(UserError, match=rf'{name} is not an image that can be read.*remove it') as caught:
      make_input(kind, hold_out(_load(root).splits['train'], 0, False)[0], sharding, workers=0, resident_bytes=0)
    assert '\n' not in str(caught.value)
