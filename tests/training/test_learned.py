"""Learned classes of a trained classifier: they answer as defined, leave the rest alone, and can be taken back."""

import dataclasses
import functools
import shutil

import jax
import numpy as np
import pytest
from PIL import Image

import hbf
from hbf.editing import edit
from hbf.editing.edit import labeled_images
from hbf.editing.guard import Reader
from hbf.editing.learn import learn_folder, nothing_learned
from hbf.errors import UserError
from hbf.training.export import from_run
from hbf.training.learned import FILE, Learned, LearnedClass, forget, read_learned, write_learned
from hbf.training.predict import answer, learned_in, of_trained
from hbf.training.side_file import EDITS


@pytest.fixture(scope='module')
def run(finished):
  return hbf.load(finished[0])


@pytest.fixture(scope='module')
def among(run):
  images, labels = labeled_images(run.workdir, run.config)
  return images[:300], labels[:300]


@pytest.fixture(scope='module')
def new():
  """Images of two classes that are no digits: stripes and checkers, with noise."""
  random, grid = np.random.default_rng(0), np.indices((8, 8))
  shapes = np.stack([grid[0] % 2, grid.sum(axis=0) % 2] * 4)[..., None] * 200
  return (shapes + random.integers(0, 50, shapes.shape)).astype(np.uint8), ['stripes', 'checkers'] * 4


@pytest.fixture(scope='module')
def extended(run, among, new):
  return hbf.learn(run, new[0][:6], new[1][:6], among=among)


@pytest.fixture
def folder(run, tmp_path):
  return shutil.copytree(run.workdir, tmp_path / 'run')


@pytest.fixture
def files(new, tmp_path):
  """A folder with the images of the new classes."""
  for number, (image, name) in enumerate(zip(*new, strict=True)):
    (tmp_path / 'new' / name).mkdir(parents=True, exist_ok=True)
    Image.fromarray(image[..., 0]).save(tmp_path / 'new' / name / f'{number}.png')
  return tmp_path / 'new'


def test_logits_are_as_defined_and_those_of_trained_classes_stay(run, extended, new, among):
  """Against the definition in float64."""
  reader = Reader.of(run.model, run.params, run.task)
  seen, own = reader(among[0]), reader(new[0][:6]).features.astype(np.float64)
  apply = jax.jit(functools.partial(extended.model.apply, train=False))
  found = np.asarray(apply({'params': extended.params}, run.normalize(among[0])))
  np.testing.assert_allclose(found[:, :10], seen.logits, atol=1e-5)
  features = seen.features.astype(np.float64)
  centers = [features[among[1] == label].mean(axis=0) for label in range(10)]
  centers = np.stack([*centers, own[::2].mean(axis=0), own[1::2].mean(axis=0)])
  away = np.sum(((features[:, None] - centers) @ extended.learned.metric.T.astype(np.float64)) ** 2, axis=-1)
  of_answer = away[np.arange(len(away)), seen.logits.argmax(axis=1)]
  expected = seen.logits.max(axis=1)[:, None] + (of_answer[:, None] - away[:, 10:]) / 2
  np.testing.assert_allclose(found[:, 10:], expected, rtol=1e-3, atol=1e-2)


def test_new_classes_are_answered_and_digits_stay(run, extended, new, among):
  assert extended.classes == (*run.classes, 'stripes', 'checkers')
  assert extended.predict(new[0][6:]).argmax(axis=-1).tolist() == [10, 11]
  before = run.predict(among[0]).argmax(axis=-1)
  assert (extended.predict(among[0]).argmax(axis=-1) == before).mean() > 0.9


def test_forgetting_is_exact(run, extended, new, among):
  first = hbf.learn(run, new[0][:6:2], new[1][:6:2], among=among)
  both = hbf.learn(first, new[0][1:6:2], new[1][1:6:2])
  np.testing.assert_array_equal(both.forget('checkers').predict(among[0]), first.predict(among[0]))
  bare = both.forget('stripes').forget('checkers')
  assert bare.learned is None
  assert bare.model == run.model
  np.testing.assert_array_equal(bare.predict(among[0]), run.predict(among[0]))


def test_classes_of_a_folder(folder, files, new):
  learn_folder(folder, str(files))
  assert [(each.name, len(each.sources)) for each in read_learned(folder).classes] == [
    ('checkers', 4),
    ('stripes', 4),
  ]
  loaded, model = hbf.load(folder, learned=True), from_run(folder)
  path = str(files / 'stripes' / '0.png')
  (found,) = answer(of_trained(model, learned_in(folder, model)), [path], 1)
  assert found.numbers[0][0] == loaded.classes[loaded.predict(new[0][:1]).argmax()] == 'stripes'
  written = (folder / FILE).read_bytes()
  with pytest.raises(UserError, match='checkers is learned already: forget it first'):
    learn_folder(folder, str(files))
  with pytest.raises(UserError, match="unknown learned class 'stripe': did you mean 'stripes'"):
    forget(folder, 'stripe')
  assert (folder / FILE).read_bytes() == written
  forget(folder, 'stripes')
  forget(folder, 'checkers')
  assert not (folder / FILE).exists()
  with pytest.raises(UserError, match='there is nothing to forget'):
    forget(folder, 'stripes')


def test_a_wrong_folder_changes_nothing(folder, files):
  before = {path.name for path in folder.iterdir()}
  for change, message in (
    (lambda: (files / 'stripes' / 'x.png').write_text('no image'), r'x\.png'),
    # The names of the classes are checked before any image is read.
    (lambda: (files / 'stripes').rename(files / '7'), '7 is a class that the classifier was trained on'),
    (lambda: (files / 'empty').mkdir(), 'empty has no image in it'),
    (lambda: (files / 'loose.png').write_text('no image'), r'loose\.png is in no class folder; .*: move it there'),
  ):
    change()
    with pytest.raises(UserError, match=message):
      learn_folder(folder, str(files))
  with pytest.raises(UserError, match="image folder '/nowhere' does not exist"):
    learn_folder(folder, '/nowhere')
  assert {path.name for path in folder.iterdir()} - before <= {'.lock'}


@pytest.mark.parametrize('label', [10, np.int64(10), 3, None, '', ' ', ['rose']])
def test_the_name_of_a_new_class_is_a_text(run, new, among, label):
  with pytest.raises(UserError, match=r"^labels has .*: expected the name of each image's class as a text, such as"):
    hbf.learn(run, new[0][:2], ['rose', label], among=among)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda images, labels: images, r'among is a ndarray: expected a pair, \(images, the class of each image\)'),
    (lambda images, labels: (images, labels[1:]), r'among\[1\] has 299 entries for 300 images'),
    (lambda images, labels: (images, labels / 2), r'a class in among\[1\] is \d\.\d: expected a whole number from 0'),
    (lambda images, labels: (images, labels - 1), r'a class in among\[1\] is -1: expected .* from 0 to 9$'),
    (lambda images, labels: (images, labels + 1), r'a class in among\[1\] is 10: expected .* from 0 to 9$'),
    (lambda images, labels: (images, labels.astype(str)), r"a class in among\[1\] is '\d': expected a whole number"),
    (lambda images, labels: (images[..., 0], labels), r'among\[0\] has shape \[300, 8, 8\]: expected \[N, 8, 8, 1\]'),
  ],
)
def test_among_is_a_pair_of_images_and_classes(run, new, among, change, message):
  with pytest.raises(UserError, match=message):
    hbf.learn(run, new[0][:1], ['rose'], among=change(*among))


def test_a_save_that_fails_leaves_the_classes_of_before(folder):
  rose = LearnedClass('rose', ('a.png',), np.ones(3, np.float32))
  learned = Learned(1, False, np.eye(3), np.ones((10, 3)), (rose,))
  write_learned(folder, learned)
  before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
  wrong = {10: 'learned.npz was not written, because it could not be read again', object(): 'not JSON serializable'}
  for name, message in wrong.items():
    both = dataclasses.replace(learned, classes=(rose, dataclasses.replace(rose, name=name)))
    with pytest.raises((UserError, TypeError), match=message):
      write_learned(folder, both)
  assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
  assert read_learned(folder).names == ('rose',)


def test_every_class_has_images_among_the_known_ones(run, monkeypatch):
  """Evenly spaced images may contain one image of a rare class, or none."""
  chosen, classes = np.arange(0, 100, 5), np.repeat([0, 1, 2], [90, 7, 3])
  monkeypatch.setattr(edit, 'FEWEST', 4)
  found = edit._with_rare(chosen, classes)
  assert np.bincount(classes[found]).tolist() == [18, 4, 3] and set(chosen) <= set(found)
  monkeypatch.setattr(edit, 'GUARDED', 5)
  _, labels = labeled_images(run.workdir, run.config)
  assert np.bincount(labels, minlength=10).min() >= 4


def test_a_class_without_images_is_named(run, among):
  names = ['rose', 'tulip']
  reader = Reader.of(run.model, run.params, run.task)
  with pytest.raises(UserError, match=r'class tulip has 1 images among .* train with more images of it'):
    nothing_learned(reader, among[0][:4], np.array([0, 0, 0, 1]), names, 0, False)


def test_wrong_classes(run, extended, new, among, folder):
  with pytest.raises(UserError, match='labels has 2 entries for 1 images'):
    hbf.learn(run, new[0][:1], ['a', 'b'], among=among)
  with pytest.raises(UserError, match='class 9 has 0 images among those of the trained classes'):
    hbf.learn(run, new[0][:1], ['a'], among=(among[0][:18], np.repeat(np.arange(9), 2)))
  with pytest.raises(UserError, match='learned classes, which edits can not join yet'):
    hbf.edit(extended, among[0][:1], [3])
  with pytest.raises(UserError, match='learned classes are of step 1, not of step'):
    run.with_learned(dataclasses.replace(extended.learned, step=1))
  with pytest.raises(UserError, match='call predict on your own'):
    extended.evaluate()
  with pytest.raises(UserError, match='the run has no learned class rose'):
    run.forget('rose')
  with pytest.raises(UserError, match='has no learned classes: add some'):
    hbf.load(folder, learned=True)
  write_learned(folder, extended.learned)
  edited = hbf.edit(run, new[0][:1], [3], among=among[0])
  with pytest.raises(UserError, match='the run has edits, which learned classes can not join yet'):
    edited.with_learned(extended.learned)
  with pytest.raises(UserError, match='the run has learned classes, which edits can not join yet'):
    extended.with_edits(edited.edits)
  with pytest.raises(UserError, match='learned classes, which edits can not join yet: forget them'):
    dataclasses.replace(edited, workdir=folder).save_edits()
  assert not (folder / EDITS).exists()
  (folder / FILE).write_bytes(b'PK')
  with pytest.raises(UserError, match=r'is damaged .*restore it from a copy, or remove it'):
    hbf.load(folder, learned=True)


def test_a_network_that_loops_over_its_blocks_can_learn_classes(extended, run):
  model = run.model.clone(trunk=run.model.trunk.clone(scan_layers=True))
  module, params = extended.learned.applied(model, run.params)
  call = functools.partial(module.apply, train=False)
  assert jax.eval_shape(call, {'params': params}, np.zeros((3, 8, 8, 1), np.float32)).shape == (3, 12)
