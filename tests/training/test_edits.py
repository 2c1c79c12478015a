"""Tests of edits of a trained classifier: they do what they say, leave the rest alone, and can be undone."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest
from PIL import Image

import hbf
from configs import digits
from hbf import api
from hbf.config.resolve import resolve
from hbf.editing import edit as image_edits
from hbf.editing.edit import edit_files, guarded_images
from hbf.editing.guard import Reader, copies, distance_to_others, measure_metric, moves
from hbf.editing.text import edit_text
from hbf.errors import UserError
from hbf.models.build import abstract_params, build_model
from hbf.models.edited import EDITS, EditedClassifier, Observed
from hbf.training.edits import Edit, Edits
from hbf.training.edits_file import FILE, read_edits, undo, write_edits
from hbf.training.export import export, from_run, load_program


@pytest.fixture(scope='module')
def run(finished):
  return hbf.load(finished[0])


@pytest.fixture(scope='module')
def images(run):
  """Return sixty training images."""
  return guarded_images(run.workdir, run.config)[:60]


@pytest.fixture(scope='module')
def wanted(run, images):
  """Return, for each of three images, a class that is not the answer."""
  return [int(label) for label in np.argsort(run.predict(images[:3]), axis=-1)[:, -2]]


@pytest.fixture(scope='module')
def edited(run, images, wanted):
  return hbf.edit(run, images[:3], wanted, among=images)


@pytest.fixture
def folder(run, tmp_path):
  return shutil.copytree(run.workdir, tmp_path / 'run')


def logits(run, images):
  apply = jax.jit(functools.partial(run.model.apply, train=False))
  return np.asarray(apply({'params': run.params}, run.normalize(images)))


def random_edits(count, dims=6, classes=4, seed=0):
  rng = np.random.default_rng(seed)
  centers, changes = rng.normal(size=(count, 1, dims)).astype(np.float32), rng.normal(size=(count, 1, classes))
  made = [Edit(f'{i}', 'a', 'b', centers[i], np.array([1.5]), changes[i]) for i in range(count)]
  return Edits(0, False, rng.normal(size=(dims, dims)).astype(np.float32) / 2, tuple(made))


def test_changes_are_a_hyperbf_that_interpolates():
  """The changes equal the definition in float64. At the centers, they are the wanted changes."""
  edits = random_edits(5)
  points = np.random.default_rng(1).normal(size=(200, 6))
  w, t = edits.metric.astype(np.float64), np.concatenate([edit.centers for edit in edits.edits]).astype(np.float64)

  def k(x):
    return np.maximum(1 - np.sum(((x[:, None] - t) @ w.T) ** 2, -1) / 1.5**2, 0)

  changes = np.concatenate([edit.changes for edit in edits.edits])
  c = np.linalg.solve(k(t), changes)
  np.testing.assert_allclose(edits.changes(points), k(points) @ c, rtol=1e-3, atol=1e-4)
  np.testing.assert_allclose(edits.changes(t), changes, rtol=1e-3, atol=1e-4)


def test_two_changes_at_the_same_point_are_refused():
  (edit,) = random_edits(1).edits
  with pytest.raises(UserError, match='the points of the model are the same for two of the edited'):
    _ = random_edits(1).added(edit).params


def test_an_edited_image_leads_by_the_margin_and_far_images_stay(run, images, wanted, edited):
  z = logits(edited, images)
  for i, label in enumerate(wanted):
    assert z[i, label] - np.delete(z[i], label).max() == pytest.approx(16, abs=0.05)
  base = Reader.of(run.model, run.params, run.task)(images)
  responses = edited.edits.responses(base.points)
  far = responses.max(axis=1) == 0
  assert far.any()
  np.testing.assert_allclose(z[far], base.logits[far], atol=1e-4)


def test_no_image_whose_answer_should_stay_is_in_a_ball(run, images, wanted, edited):
  base = Reader.of(run.model, run.params, run.task)(images)
  answers, responses = base.logits.argmax(axis=-1), edited.edits.responses(base.points)
  for i, label in enumerate(wanted):
    others = answers != label
    others[i] = False
    assert responses[others, i].max() < 1e-5  # the nearest one is at the edge
    assert responses[i, i] == pytest.approx(1, abs=1e-5)


def test_all_methods_of_an_edited_run_use_the_edits(edited, images, wanted, tmp_path, folder):
  assert edited.predict(images[:3]).argmax(axis=-1).tolist() == wanted
  there = dataclasses.replace(edited, workdir=folder)
  mine = there.evaluate()
  assert mine['edits'] == 3
  there.save_edits()
  assert hbf.evaluate(folder, edits=True)['confusion'] == mine['confusion']
  loaded = hbf.load(folder, edits=True)
  np.testing.assert_array_equal(loaded.predict(images), edited.predict(images))
  export(from_run(folder, edits=True), tmp_path / 'exported')
  assert np.argmax(load_program(tmp_path / 'exported')(images[:3]), axis=-1).tolist() == wanted


def test_edits_of_another_checkpoint_are_refused(edited, run):
  for others in ({'step': 1}, {'average': True}):
    of_another = dataclasses.replace(edited.edits, **others)
    for call in (run.with_edits, lambda edits: hbf.evaluate(run.workdir, edits=edits)):
      with pytest.raises(UserError, match=r'edits are of step .*: take the run of checkpoint='):
        call(of_another)
  assert hbf.evaluate(run.workdir, edits=edited.edits)['params'] == hbf.evaluate(run.workdir)['params']


def test_undo_is_exact(run, images, wanted, edited):
  before = hbf.edit(run, images[:2], wanted[:2], among=images)
  np.testing.assert_array_equal(edited.undo().predict(images), before.predict(images))
  bare = edited.undo().undo(0).undo()
  assert bare.edits is None
  assert bare.model == run.model
  np.testing.assert_array_equal(bare.predict(images), run.predict(images))


def test_an_image_that_an_earlier_edit_made_right_needs_none(run, images, wanted):
  again = hbf.edit(run, images[[0, 0]], wanted[:1] * 2, among=images)
  assert len(again.edits) == 1


def test_wrong_edits(run, images, wanted, edited):
  with pytest.raises(UserError, match=r'image 0 is answered . already: there is nothing to edit'):
    hbf.edit(edited, images[:1], wanted[:1], among=images)
  with pytest.raises(UserError, match=r'image 0 is the image of edit 0, which answers .: undo that edit first'):
    hbf.edit(edited, images[:1], [(wanted[0] + 1) % 10], among=images)
  with pytest.raises(UserError, match="unknown label 'cat'"):
    hbf.edit(run, images[:1], ['cat'], among=images)
  with pytest.raises(UserError, match='label is 10: expected 0 to 9'):
    hbf.edit(run, images[:1], [10], among=images)
  with pytest.raises(UserError, match=r'label is 1\.5: expected 0 to 9, or the name of a class'):
    hbf.edit(run, images[:1], [1.5], among=images)
  with pytest.raises(UserError, match='answers has 2 entries for 1 images'):
    hbf.edit(run, images[:1], [1, 2], among=images)
  with pytest.raises(UserError, match='reach is 0'):
    hbf.edit(run, images[:1], wanted[:1], among=images, reach=0.0)
  with pytest.raises(UserError, match="reach is '1': expected a number above 0"):
    hbf.edit(run, images[:1], wanted[:1], reach='1')
  with pytest.raises(UserError, match='margin is inf: expected a number above 0'):
    hbf.edit(run, images[:1], wanted[:1], margin=np.inf)
  with pytest.raises(UserError, match='all images whose answers should stay'):
    hbf.edit(run, images[:1], wanted[:1], among=images[:1])
  with pytest.raises(UserError, match='edit 3 does not exist: expected 0 to 2'):
    edited.undo(3)
  with pytest.raises(UserError, match="edit 'image 0' does not exist: expected 0 to 2"):
    edited.undo('image 0')
  with pytest.raises(UserError, match='the run has no edit 0'):
    run.undo(0)


def test_the_file_of_edits(folder, edited):
  assert read_edits(folder) is None
  write_edits(folder, edited.edits)
  again = read_edits(folder)
  assert (again.step, again.average, len(again)) == (edited.step, False, 3)
  for mine, theirs in zip(again.edits, edited.edits.edits, strict=True):
    assert (mine.source, mine.was, mine.label, mine.radii) == (
      theirs.source,
      theirs.was,
      theirs.label,
      theirs.radii,
    )
    np.testing.assert_array_equal(mine.centers, theirs.centers)
  write_edits(folder, None)
  assert not (folder / FILE).exists()
  with pytest.raises(UserError, match='has no edits: make one'):
    hbf.load(folder, edits=True)
  write_edits(folder, dataclasses.replace(edited.edits, step=1))
  with pytest.raises(UserError, match='are of step 1, not of step'):
    hbf.load(folder, edits=True)
  (folder / FILE).write_bytes(b'PK')
  with pytest.raises(UserError, match=r'is damaged .*restore it from a copy, or remove it'):
    read_edits(folder)


def test_edits_of_files(folder, images, wanted, tmp_path):
  paths = [str(tmp_path / f'{i}.png') for i in range(2)]
  for path, image in zip(paths, images, strict=False):
    Image.fromarray(image[..., 0]).save(path)
  made = edit_files(folder, paths[:1], str(wanted[0]))
  assert made.guarded > 1_000
  assert made.changed >= 1  # the image itself is one of them
  edit_files(folder, paths[1:], str(wanted[1]))
  assert [(edit.source, edit.label) for edit in read_edits(folder).edits] == [
    (path, str(label)) for path, label in zip(paths, wanted, strict=False)
  ]
  written = (folder / FILE).read_bytes()
  (tmp_path / 'text.png').write_text('no image')
  with pytest.raises(UserError, match=r'text\.png'):
    edit_files(folder, [str(tmp_path / 'text.png')], '3')
  with pytest.raises(UserError, match='edit 2 does not exist'):
    undo(folder, 2)
  assert (folder / FILE).read_bytes() == written
  undo(folder, 1)
  undo(folder, 0)
  assert not (folder / FILE).exists()
  with pytest.raises(UserError, match='there is nothing to undo'):
    undo(folder, 0)


def test_a_wrong_label_or_image_is_found_before_the_training_images_are_read(run, folder, monkeypatch, tmp_path):
  monkeypatch.setattr(image_edits, 'restore', None)
  monkeypatch.setattr(image_edits, 'guarded_images', None)
  with pytest.raises(UserError, match="unknown label 'tree'"):
    edit_files(folder, [str(tmp_path / 'none.png')], 'tree')
  with pytest.raises(UserError, match=r'none\.png'):
    edit_files(folder, [str(tmp_path / 'none.png')], '3')
  monkeypatch.setattr(api, 'guarded_images', None)
  with pytest.raises(UserError, match='label is 10: expected 0 to 9'):
    hbf.edit(run, np.zeros((1, 8, 8, 1), np.uint8), [10])


def test_an_image_run_has_no_prompt_to_edit(folder):
  with pytest.raises(UserError, match='holds a run of task classification: give images with their --label'):
    edit_text(folder, 'The ', 'cat')
  assert not (folder / FILE).exists()


def test_a_file_of_before_edits_of_texts_is_read(folder, edited):
  write_edits(folder, edited.edits)
  with np.load(folder / FILE) as stored:
    arrays = dict(stored)
  about = json.loads(str(arrays.pop('about')))
  for edit in about['edits']:
    del edit['centers']
  np.savez(folder / FILE, about=np.array(json.dumps(about)), **arrays)
  found = read_edits(folder)
  np.testing.assert_array_equal(found.params['coefficients'], edited.edits.params['coefficients'])
  np.savez(folder / FILE, about=np.array(json.dumps(about)), **arrays | {'radius': arrays['radius'][1:]})
  with pytest.raises(UserError, match='other numbers of centers'):
    read_edits(folder)


def test_the_metric_draws_copies_together(run, images):
  """The copies are nearer to each other than in a metric that only divides by standard deviations."""
  reader = Reader.of(run.model, run.params, run.task)
  metric = measure_metric(reader, images, (('shift', 1),))
  moved = reader(copies(images[:20], (('shift', 1),), 4, seed=9).reshape(-1, *images.shape[1:])).points
  moved = moved.reshape(20, 4, -1)

  def ratio(w):
    z = moved @ w.T
    return np.linalg.norm(z - z.mean(1, keepdims=True)) / np.linalg.norm(z - z.mean((0, 1)))

  assert ratio(metric) < ratio(np.diag(1 / moved.std((0, 1))))


def test_copies_move_as_in_training():
  assert moves((('alternate_flip',), ('erase', 0.5), ('shift', 4)), 32) == (('flip', 0.5), ('shift', 4))
  assert moves((('erase', 0.5),), 32) == (('shift', 4),)
  images = np.arange(2 * 8 * 8 * 1, dtype=np.uint8).reshape(2, 8, 8, 1)
  made = copies(images, (('flip', 0.5),), 16, seed=0)
  assert made.shape == (2, 16, 8, 8, 1)
  for image, of_image in zip(images, made, strict=True):
    kinds = {z.tobytes() for z in of_image}
    assert kinds == {image.tobytes(), image[:, ::-1].tobytes()}


def test_the_distance_to_the_nearest_other():
  points = np.array([[0.0, 0.0], [1.0, 0.0], [5.0, 0.0]])
  guard = Observed(np.eye(2)[[1, 0, 1]], points, points)
  assert distance_to_others(guard, points[1], 0, np.diag([2.0, 1.0])) == pytest.approx(2)
  assert distance_to_others(guard, points[0], 0, np.eye(2)) == pytest.approx(5)  # the image itself does not count
  assert distance_to_others(guard.at([1]), points[0], 0, np.eye(2)) == np.inf


def test_the_classifier_below_keeps_its_parameters(run, edited):
  assert isinstance(edited.model, EditedClassifier)
  assert {*edited.params} - {*run.params} == {EDITS}
  below = edited.with_edits(None).params
  jax.tree.map(np.testing.assert_array_equal, below, dict(run.params))


def test_a_network_that_loops_over_its_blocks_can_be_edited():
  config = resolve(digits.get_config('model=vit')).model
  with config.unlocked():
    config.update(width=6, heads=2, positions='learned', scan_layers=True)
  model = build_model(config, 4)
  module, params = random_edits(2).applied(model, abstract_params(model, (8, 8, 1)))
  call = functools.partial(module.apply, train=False)
  assert jax.eval_shape(call, {'params': params}, np.zeros((3, 8, 8, 1), np.float32)).shape == (3, 4)
