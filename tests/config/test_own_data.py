"""A data set of a user's own: one function, registered in one place, by the name of its file."""

import dataclasses
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import hbf
from hbf.config.command_line import read_config
from hbf.data import registry
from hbf.data.datasets import load
from hbf.data.text.texts import load_texts
from hbf.errors import UserError

TEXTS = {'dir': '', 'root': '', 'download': False, 'test_split': 'test', 'tokenizer': 'bytes', 'vocabulary': 0}
PAGE = Path(__file__).parents[2] / 'docs' / 'how-to' / 'own-formats.md'


@pytest.fixture(autouse=True)
def forgotten(tmp_path, monkeypatch):
  """Run a test in an empty folder, and forget its data sets."""
  monkeypatch.setattr(registry, 'REGISTERED', {})
  monkeypatch.setattr(sys, 'path', [*sys.path])
  monkeypatch.chdir(tmp_path)
  yield
  sys.modules.pop('shapes', None)


def examples():
  """Return the Python examples of the page: arrays, a function, and a function with a source."""
  return re.findall(r'```python\n(.*?)```', PAGE.read_text(), re.DOTALL)


def open_it(name, image_size=0, **changes):
  return load(name=name, dir='/nowhere', root='', image_size=image_size, download=False, **changes)


def test_a_file_in_the_folder_is_known_to_commands(tmp_path):
  (tmp_path / 'shapes.py').write_text(examples()[1])
  config = read_config(['--config=shapes:model=vit'])
  assert (config.data.name, config.data.validation, config.train.batch_size) == ('shapes', 0.2, 8)
  assert config.model.name == 'vit'
  dataset = open_it('shapes')
  assert (dataset.name, dataset.classes, dataset.image_shape) == ('shapes', ('square', 'noise'), (8, 8, 3))
  assert len(dataset.splits['test']) == 50 and hbf.get_config('shapes').data.name == 'shapes'


def test_the_examples_of_the_page_run(tmp_path):
  arrays, shapes, stripes = examples()
  exec(arrays, {})
  dataset = load(name='array_files', dir='', root='digits.npz', image_size=0, download=False)
  assert dataset.image_shape == (8, 8, 1) and len(dataset.splits['train']) == 1500
  scope = {}
  exec(shapes + stripes, scope)
  image, label = open_it('stripes').splits['train'][3]
  assert label == 1 and image[3].min() == 255 and image.sum() == 255 * 8 * 3


def test_a_text_of_ones_own():
  for opened in ('ab' * 50, {'train': b'ab' * 45, 'test': 'ab' * 5}):
    hbf.register_dataset('letters', lambda request, opened=opened: opened, text=True, data={'length': 4})
    config = hbf.get_config('letters')
    assert (config.task, config.data.length) == ('next_token', 4)
    about = {
      'dir': '',
      'root': '',
      'download': False,
      'test_split': 'test',
      'tokenizer': 'characters',
      'vocabulary': 0,
    }
    texts = load_texts(name='letters', **about)
    assert {split: len(part) for split, part in texts.splits.items()} == {'train': 90, 'test': 10}


def test_wrong_names_and_files_are_refused(tmp_path):
  with pytest.raises(ValueError, match=r"name is 'cifar10': expected a word that is no data set of the package"):
    hbf.register_dataset('cifar10', print)
  with pytest.raises(ValueError, match=r"name is '../x': expected a word"):
    hbf.register_dataset('../x', print)
  (tmp_path / 'shapes.py').write_text("import hbf\nhbf.register_dataset('shape', print)")
  with pytest.raises(UserError, match=r'shapes\.py does not register shapes; expected .*rename the file'):
    open_it('shapes')
  (tmp_path / 'forms.py').write_text('import hbf\nhbf.register_dataset(NAME, print)')
  with pytest.raises(UserError, match=r"^forms\.py, line 2: NameError: name 'NAME' is not defined: correct the file"):
    open_it('forms')
  (tmp_path / 'other.py').write_text("raise AssertionError('imported')")
  with pytest.raises(UserError, match=r"unknown data set 'other'.*no other\.py in the working folder registers it"):
    open_it('other')


IMAGES = np.zeros((4, 8, 8, 3), np.uint8)
ARRAYS = hbf.ArrayData(IMAGES, np.arange(4) % 2, IMAGES, np.arange(4) % 2)


def of_example(image, label):
  """Return a data set whose splits are lists of one example."""
  return hbf.Dataset('own', ('a', 'b'), (8, 8, 3), {split: [(image, label)] for split in ('train', 'test')})


GOOD = of_example(IMAGES[0], 0)


@pytest.mark.parametrize(
  ('opened', 'changes', 'message'),
  [
    ('a text', {}, r'the data set own is of type str; expected hbf\.Dataset or hbf\.ArrayData'),
    (ARRAYS, {'validation_split': 'val'}, r'the data set own lacks validation; expected the splits train, test'),
    (ARRAYS, {'image_size': 16}, r'own has images of 8×8 pixels, and data\.image_size is 16'),
    (of_example(IMAGES[0] / 255, 0), {}, r'an image of own is float64 \[8, 8, 3\]; expected uint8 \[8, 8, 3\]'),
    (of_example(IMAGES[0, 2:], 0), {}, r'an image of own is uint8 \[6, 8, 3\]; expected uint8'),
    (of_example(IMAGES[0], 2), {}, r'a label of own is 2; expected a whole number up to 1'),
    (of_example(IMAGES[0], np.eye(2)[0]), {}, r'a label of own is array\(.*\); expected a whole number up to 1'),
    (dataclasses.replace(GOOD, image_shape=(8, 8)), {}, r'own has image_shape \(8, 8\); expected height, width and'),
    (dataclasses.replace(GOOD, classes=()), {}, 'own has no classes: name them'),
    (
      dataclasses.replace(GOOD, classes=('a', 'a')),
      {},
      r"own has classes \('a', 'a'\); expected texts, all different",
    ),
    (dataclasses.replace(GOOD, classes='ab'), {}, "own has classes 'ab'; expected texts"),
    (
      dataclasses.replace(GOOD, targets='class'),
      {},
      "own has targets 'class'; expected one of classes, labels, values",
    ),
    (dataclasses.replace(GOOD, splits=GOOD.splits | {'train': []}), {}, 'own has no image in train: give it one'),
    (dataclasses.replace(GOOD, splits=GOOD.splits | {'test': []}), {}, 'own has no image in test: give it one'),
  ],
)
def test_what_a_function_returns_is_checked(opened, changes, message):
  hbf.register_dataset('own', lambda request: opened)
  with pytest.raises(UserError, match=message):
    open_it('own', **changes)


def of_targets(targets, *labels):
  """Return a data set with two classes, labels or values. Its test split has these targets."""
  splits = {'train': [(IMAGES[0], labels[0])], 'test': [(IMAGES[0], label) for label in labels]}
  return dataclasses.replace(GOOD, splits=splits, targets=targets)


def of_images(*images):
  """Return a data set whose test split has these images."""
  splits = {'train': [(images[0], 0)], 'test': [(image, 0) for image in images]}
  return dataclasses.replace(GOOD, splits=splits)


@pytest.mark.parametrize(
  ('opened', 'message'),
  [
    (of_targets('classes', 0, 3), r'a label of own is 3; expected a whole number up to 1: .* \(example 1 of test\)'),
    (of_targets('classes', 0, -1), r'a label of own is -1; expected'),
    (of_targets('classes', 0, 0.5), r'a label of own is 0\.5; expected'),
    (of_targets('labels', [0, 1], [1, 5.0]), r'a label of own is \[1\.0, 5\.0\]; expected numbers that are 0 or 1'),
    (of_targets('values', [0, 1], [1, np.nan]), r'a label of own is \[1\.0, nan\]; expected numbers that are finite'),
    (
      of_images(IMAGES[0], IMAGES[0] / 255),
      r'an image of own is float64 \[8, 8, 3\]; expected uint8 .* \(example 1 of test\)',
    ),
    (
      of_images(IMAGES[0], IMAGES[0, ..., :1]),
      r'an image of own is uint8 \[8, 8, 1\]; expected uint8 \[8, 8, 3\]',
    ),
  ],
)
def test_every_example_of_ones_own_source_is_checked_when_it_is_read(opened, message):
  hbf.register_dataset('own', lambda request: opened)
  found = open_it('own', targets=opened.targets).splits['test']
  assert len(found) == 2 and found[0][0].shape == (8, 8, 3)
  for read in (lambda: found[1], lambda: list(found.read(np.arange(2)))):
    with pytest.raises(UserError, match=message):
      read()


class Stripes(list):
  """A source that returns all its labels without its images, as a list."""

  def read_labels(self):
    return [label for _, label in self]


class Short(Stripes):
  """A source that returns a label too few."""

  def read_labels(self):
    return super().read_labels()[1:]


class Ragged(Stripes):
  """A source that returns labels of different shapes."""

  def read_labels(self):
    return [[0], *super().read_labels()[1:]]


def test_labels_that_a_source_returns_at_once_are_checked_when_it_is_opened():
  wrong = Stripes([(IMAGES[0], 0), (IMAGES[0], 2)])
  hbf.register_dataset('own', lambda request: dataclasses.replace(GOOD, splits=GOOD.splits | {'train': wrong}))
  with pytest.raises(UserError, match=r'a label of own is .*2.*; expected .* \(example 1 of train\)'):
    open_it('own')


@pytest.mark.parametrize(
  ('kind', 'message'),
  [
    (Short, r'the labels of own in train have shape \[1\]; expected 2, one for each image: change read_labels'),
    (Ragged, 'the labels of own in train have different lengths; expected one shape: change read_labels'),
  ],
)
def test_labels_that_do_not_fit_the_images_are_refused(kind, message):
  found = kind([(IMAGES[0], 0), (IMAGES[0], 1)])
  hbf.register_dataset('own', lambda request: dataclasses.replace(GOOD, splits=GOOD.splits | {'train': found}))
  with pytest.raises(UserError, match=message):
    open_it('own')


def test_labels_as_a_list_become_an_array():
  hbf.register_dataset(
    'own', lambda request: dataclasses.replace(GOOD, splits={s: Stripes(GOOD.splits[s]) for s in GOOD.splits})
  )
  assert isinstance(open_it('own').splits['train'].read_labels(), np.ndarray)


def test_a_split_that_the_config_does_not_name_is_not_used():
  splits = GOOD.splits | {'validation': [(IMAGES[0], 0)]}
  hbf.register_dataset('own', lambda request: dataclasses.replace(GOOD, splits=splits))
  assert [*open_it('own').splits] == ['train', 'test']
  assert [*open_it('own', validation_split='validation').splits] == ['train', 'test', 'validation']


def test_a_cache_of_ones_own_images_is_read_without_the_source(tmp_path):
  reads = []

  class Counted(list):
    """A source that counts the images that it reads."""

    def __getitem__(self, index):
      reads.append(index)
      return super().__getitem__(index)

  splits = {split: Counted((IMAGES[0], k % 2) for k in range(200)) for split in ('train', 'test')}
  hbf.register_dataset('own', lambda request: dataclasses.replace(GOOD, splits=splits))
  first = open_it('own', cache=str(tmp_path)).splits['test']
  reads.clear()
  again = open_it('own', cache=str(tmp_path)).splits['test']
  assert len(reads) < 150  # those of the fingerprint
  assert again[3][1] == 1
  np.testing.assert_array_equal(again.read_labels(), first.read_labels())


@pytest.mark.parametrize(
  ('defaults', 'message'),
  [
    ({'seed': 1}, r"seed is 1: expected values of keys by section, such as model=\{'patch': 8\}; sections: "),
    ({'task': 'multi_label'}, r"task is 'multi_label': expected values of keys by section"),
    ({'trian': {'epochs': 1.0}}, r'trian is .*: expected values of keys by section.* train'),
  ],
)
def test_defaults_of_no_section_are_refused_at_once(defaults, message):
  with pytest.raises(UserError, match=message):
    hbf.register_dataset('own', print, **defaults)


def test_defaults_reach_the_config_or_are_refused():
  hbf.register_dataset('own', print, model={'stage2': {'kernel': 'laplacian'}, 'patch': 2})
  config = hbf.get_config('own')
  assert (config.model.stage2.kernel, config.model.patch) == ('laplacian', 2)
  assert hbf.get_config('own', model='vit').model.patch == 2  # an MLP has no kernel
  hbf.register_dataset('own', print, train={'batch_size': '8'})
  with pytest.raises(UserError, match=r'the defaults of own are wrong \(.*batch_size.*\): correct register_dataset'):
    hbf.get_config('own')


def test_a_file_in_the_folder_does_not_hide_a_data_set_of_the_package(tmp_path):
  for name in ('digits', 'tiny_shakespeare'):
    Path(f'{name}.py').write_text("import hbf\nhbf.register_dataset('mine', print)")
  Path('text').write_text('this is no Python')
  assert read_config(['--config=text']).data.name == 'python'
  assert load(name='digits', dir=str(tmp_path), root='', image_size=0, download=False).image_shape == (8, 8, 1)
  with pytest.raises(UserError, match='tiny_shakespeare is not prepared'):
    load_texts(name='tiny_shakespeare', **TEXTS)


@pytest.mark.parametrize(
  ('opened', 'message'),
  [
    (
      {'train': ['a text'], 'test': ['another']},
      'own is of type dict; expected a text, or a dict of the texts',
    ),
    ('\udc80' * 100, r'the text of a registered function is not Unicode \(.*surrogates.*\): return its bytes'),
  ],
)
def test_texts_that_a_function_returns_are_checked(opened, message):
  hbf.register_dataset('own', lambda request: opened)
  with pytest.raises(UserError, match=message):
    load_texts(name='own', **TEXTS)


def test_images_are_no_text():
  hbf.register_dataset('own', lambda request: ARRAYS)
  with pytest.raises(UserError, match=r'the data set own is of type ArrayData; expected a text'):
    load_texts(name='own', **TEXTS)
