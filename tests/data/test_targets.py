"""Tests of labels and values: arrays, and the CSV files of an image folder."""

import shutil
import warnings

import numpy as np
import pytest
from PIL import Image

import hbf
from hbf.data.datasets import load
from hbf.data.images.sources import hold_out, labels
from hbf.data.pipeline.identity import identity
from hbf.errors import UserError

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), np.uint8)
LABELS = np.array([[0, 1], [1, 1], [0, 0], [1, 0], [1, 1], [0, 1]])


def write(root, name='labels.csv', columns='red,big', rows=LABELS, files=None):
  """Write the images, the first four to train/, and a CSV file for each split."""
  for split, numbers in (('train', range(4)), ('test', range(4, 6))):
    (root / split / 'more').mkdir(parents=True, exist_ok=True)
    lines = [f'file,{columns}']
    for number in numbers:
      path = f'more/{number}.png' if number % 2 else f'{number}.png'
      Image.fromarray(IMAGES[number]).save(root / split / path)
      lines.append(','.join([path, *map(str, rows[number])]))
    (root / split / name).write_text('\n'.join(lines) + '\n')
  return root


def opened(root, targets='labels'):
  return load(name='image_folder', dir='', root=str(root), image_size=8, download=False, targets=targets)


def test_labels_of_a_folder_are_those_of_its_file(tmp_path):
  found = opened(write(tmp_path))
  assert (found.classes, found.targets, found.image_shape) == (('red', 'big'), 'labels', (8, 8, 3))
  for split, rows in (('train', slice(0, 4)), ('test', slice(4, 6))):
    np.testing.assert_array_equal(labels(found.splits[split]), LABELS[rows])
    image, label = found.splits[split][1]
    np.testing.assert_array_equal(image, IMAGES[rows][1])
    np.testing.assert_array_equal(label, LABELS[rows][1])
  train, held_out = hold_out(found.splits['train'], 0.25, False)
  assert sorted(map(tuple, [*labels(train), *labels(held_out)])) == sorted(map(tuple, LABELS[:4]))


def test_columns_are_matched_by_name_and_values_keep_their_digits(tmp_path):
  values = np.array([[0.1, -1e20], [1 / 3, 7.0], [2e-9, 0.0], [1.0, 5.0], [4.0, 6.0], [8.0, 9.0]])
  root = write(tmp_path, 'targets.csv', 'height,age', values.tolist())
  lines = ['\ufefffile , age, height ', '4.png,6,4', '', 'more/5.png,9,8']  # as spreadsheets write it
  (root / 'test' / 'targets.csv').write_text('\r\n'.join(lines))
  found = opened(root, 'values')
  np.testing.assert_array_equal(labels(found.splits['train']), values[:4].astype(np.float32))
  np.testing.assert_array_equal(labels(found.splits['test']), values[4:])
  before = identity(found)
  assert before['targets'] == 'values'
  (root / 'train' / 'targets.csv').write_text((root / 'train' / 'targets.csv').read_text().replace('0.1', '0.2'))
  assert identity(opened(root, 'values'))['fingerprint'] != before['fingerprint']


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('', "begins with '': expected 'file' and then the names of the labels"),
    ('red,file\n', "begins with 'red,file'"),
    ('file,red,red\n', 'all different'),
    ('file,red,big\n', 'lists no image'),
    ('file,red,big\n0.png,1\n', 'line 2 of .* has 2 columns; expected 3'),
    ('file,red,big\n0.png,1,yes\n', "line 2 of .* has 'yes'; expected a number"),
    ('file,red,big\n\n0.png,1,2\n', 'line 3 of .*labels.csv has 2: expected 0 or 1 for every label; mend the line'),
    ('file,red,big\n0.png,1,nan\n', 'line 2 of .*labels.csv has nan: expected 0 or 1'),
    ('file,red,big\n0.png,1,0\n0.png,1,0\n', 'lists 0.png twice'),
    ('file,red,big\n0.png,1,0\n./0.png,0,1\n', 'lists 0.png twice'),
    ('file,red,big\n0.png,1,0\nmore/..//0.png,0,1\n', 'lists 0.png twice'),
    ('file,red,big\n../test/4.png,1,0\n', r'lists \.\./test/4\.png, which is outside of \S+/train; expected'),
    ('file,red,big\nmore/../../test/4.png,1,0\n', r'lists more/\.\./\.\./test/4\.png, which is outside of'),
    ('file,red,big\n..,1,0\n', r'lists \.\., which is outside of'),
    ('file,red,big\n/4.png,1,0\n', r'lists /4\.png, which is outside of \S+/train'),
    ('file,red,big\n9.png,1,0\n', 'lists 9.png, which is not a file'),
  ],
)
def test_a_wrong_file_of_labels_is_named(tmp_path, text, message):
  (write(tmp_path) / 'train' / 'labels.csv').write_text(text)
  with pytest.raises(UserError, match=message):
    opened(tmp_path)


def test_missing_files_and_other_columns_are_named(tmp_path):
  write(tmp_path)
  with pytest.raises(UserError, match=r'train/targets.csv does not exist; expected a CSV file with a column file'):
    opened(tmp_path, 'values')
  shutil.rmtree(tmp_path / 'train' / 'more')
  with pytest.raises(
    UserError, match=r'labels\.csv and no folder of a class: choose the task for labels, multi_label'
  ):
    opened(tmp_path, 'classes')
  write(tmp_path)
  (tmp_path / 'test' / 'labels.csv').write_text('file,red,small\n4.png,1,0\n')
  with pytest.raises(UserError, match=r'has the columns red, small; expected those of .*: red, big'):
    opened(tmp_path)


def test_a_path_in_a_longer_form_is_the_same_image(tmp_path):
  before = identity(opened(write(tmp_path)))
  (tmp_path / 'test' / 'labels.csv').write_text('file,red,big\n./4.png,1,1\nmore/../more//5.png,0,1\n')
  with warnings.catch_warnings(action='error'):  # nothing is called unlisted
    assert identity(opened(tmp_path)) == before


def test_files_that_are_not_listed_are_named(tmp_path):
  (write(tmp_path) / 'test' / 'labels.csv').write_text('file,red,big\nmore/5.png,1,0\n')
  with pytest.warns(
    UserWarning, match='test has files that labels.csv does not list, which are not used: 1, such as 4'
  ):
    assert len(opened(tmp_path).splits['test']) == 1


def array_data(y_train, y_test=None, **names):
  y_test = y_train[:2] if y_test is None else y_test
  return hbf.ArrayData(IMAGES, y_train, IMAGES[:2], y_test, **names)


def test_the_arrays_say_which_targets_they_are():
  assert array_data(LABELS).targets == array_data(LABELS.astype(bool)).targets == 'labels'
  assert array_data(LABELS.astype(np.uint8)).class_names == ('0', '1')
  assert array_data(LABELS / 2).targets == array_data(LABELS[:, :1] / 2).targets == 'values'
  assert array_data(LABELS[:, 0]).targets == 'classes'
  assert array_data(LABELS / 2).y_train.dtype == np.float32


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'y_train': LABELS + 1}, 'y_train has 2: expected 0 or 1 for every label. For task regression, give floats'),
    ({'y_train': LABELS[:5]}, r'y_train has shape \[5, 2\]: expected \[6, 2\], a row for each image'),
    ({'y_train': LABELS, 'y_test': LABELS[:2, :1]}, r'y_test has shape \[2, 1\]: expected \[2, 2\]'),
    ({'y_train': LABELS, 'y_test': LABELS[:2] / 2}, 'y_test has type float64: expected whole numbers 0 and 1'),
    ({'y_train': LABELS, 'class_names': ('a', 'b', 'c')}, 'class_names has 3 names: expected 2'),
    ({'y_train': np.where(LABELS, np.nan, 1.0)}, 'y_train has nan in row 0, column 1: expected finite numbers'),
    ({'y_train': LABELS * 1e300}, 'y_train has 1e[+]300 in row 0, column 1'),
    ({'y_train': 1.7e9 + LABELS}, 'y_train loses digits of column 0 in float32: subtract a constant'),
    ({'y_train': LABELS[:, 0] + 1_700_000_000}, r'y_train has label 170000000\d: expected numbers of classes, below'),
    ({'y_train': [[0, 1], [1]] * 3}, 'y_train has rows of different lengths: expected a number, or K numbers'),
    ({'y_train': LABELS, 'y_test': [[0, 1], [1]]}, 'y_test has rows of different lengths'),
    ({'y_train': LABELS[:, 0] / 2}, r'expected whole numbers, .*For task regression, expected floats \[6, K\]'),
  ],
)
def test_wrong_targets_are_named(arguments, message):
  with pytest.raises(ValueError, match=message):
    array_data(**arguments)
