"""Runs that also learn from a trained network: --config.train.teacher=WEIGHTS."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, rel_entr, softmax
from toy_runs import ONE, QUIET, assert_same_run, save_untrained, stop_at

from configs import text
from hbf.config.resolve import resolve
from hbf.data.augment.batches import normalize, renormalize
from hbf.errors import Notice, UserError
from hbf.models.build import flops_per_example
from hbf.training import processes, startup
from hbf.training.distillation import WithTeacher, divergence
from hbf.training.experiment import make_plan, prepare
from hbf.training.loop import train
from hbf.training.state import init_state, make_train_step, step_keys
from hbf.training.teacher import _fault

LEVELS = {'data.mean': (0.3,), 'data.std': (0.4,)}
OTHER_LEVELS = {'data.mean': (0.5,), 'data.std': (0.25,)}


@pytest.fixture(scope='module')
def teacher(toy, tmp_path_factory):
  """A run folder of a wider network than the student's, with random parameters and other levels of the images."""
  folder = tmp_path_factory.mktemp('teacher') / 'run'
  save_untrained(toy('model=vit', **OTHER_LEVELS, **{'model.width': 24}), folder, scale=0.3)
  return folder


def taught(source, weight=0.6, temperature=3.0):
  return {'train.teacher': str(source), 'train.teacher_weight': weight, 'train.temperature': temperature}


@pytest.mark.parametrize('temperature', [0.5, 1.0, 4.0])
def test_the_divergence_and_its_gradient_equal_float64(temperature):
  p, q = np.random.default_rng(0).normal(size=(2, 5, 7)) * 3
  expected = rel_entr(softmax(p / temperature, -1), softmax(q / temperature, -1)).sum(-1)
  np.testing.assert_allclose(divergence(jnp.asarray(p), jnp.asarray(q), temperature), expected, rtol=1e-5)
  slope = (softmax(q / temperature, -1) - softmax(p / temperature, -1)) / temperature
  found = jax.grad(lambda q: divergence(jnp.asarray(p), q, temperature).sum())(jnp.asarray(q, jnp.float32))
  np.testing.assert_allclose(found, slope, atol=1e-6)


def test_the_teacher_sees_images_with_its_own_mean_and_deviation():
  images = jnp.arange(48, dtype=jnp.uint8).reshape(1, 4, 4, 3)
  old, new = ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)), ((0.5, 0.5, 0.4), (0.2, 0.3, 0.25))
  seen = normalize(images, *old)
  np.testing.assert_allclose(renormalize(seen, old, new), normalize(images, *new), atol=1e-6)
  assert renormalize(seen, old, old) is seen


def one_step(config):
  """Return a prepared run, the parameters before its first step, and the totals after the step."""
  made = prepare(config, devices=ONE)
  data = made.inputs['train']

  @jax.jit
  def step(resident, batch, given):
    inputs = resident.data if isinstance(resident, WithTeacher) else resident
    state = init_state(made.model, made.optimizer, made.objective, inputs, batch, given)
    return state.params, make_train_step(made.model, made.optimizer, made.objective)(state, resident, batch).totals

  batch = next(data.batches(made.order, 0, 1))
  return made, *step(made.resident, batch, made.initial.params if made.initial else {})


def reference(made, params, counted=lambda targets: True):
  """Return the loss of the first step in float64, from the logits of both networks."""
  keys, _ = step_keys(made.config.seed, jnp.zeros((), jnp.int32))
  index = {'index': made.order(0), 'step': jnp.zeros((), jnp.int32)}
  seen = jax.jit(made.task.train_batch)(keys, made.resident.data, index)
  inputs, distillation = seen.inputs, made.objective.distillation
  if distillation.ours:
    levels = np.asarray(seen.inputs, np.float64) * distillation.ours[1][0] + distillation.ours[0][0]
    inputs = jnp.asarray((levels - distillation.theirs[0][0]) / distillation.theirs[1][0], jnp.float32)
  theirs, ours = (jax.jit(functools.partial(model.apply, train=False)) for model in (distillation.model, made.model))
  answers = theirs({'params': made.resident.params}, inputs)
  logits = ours({'params': params}, seen.inputs)
  p, q = (log_softmax(np.asarray(z, np.float64) / distillation.temperature, -1) for z in (answers, logits))
  kl = np.mean((np.exp(p) * (p - q)).sum(-1), where=counted(seen.targets))
  loss, _ = jax.jit(made.task.loss)(logits, seen.targets)
  return (1 - distillation.weight) * float(loss) + distillation.weight * distillation.temperature**2 * kl


def test_the_loss_of_images_is_that_of_the_paper(toy, teacher):
  made, params, totals = one_step(toy('model=vit', **LEVELS, **taught(teacher), **{'train.accumulate': 2}))
  np.testing.assert_allclose(float(totals.loss), reference(made, params), rtol=1e-5)


def text_config(path, **changes):
  config = text.get_config('model=vit')
  small = {'model.width': 16, 'model.depth': 1, 'model.heads': 2, 'model.stage2.hidden': 12, 'data.length': 24}
  run = {'data.name': 'text_file', 'data.root': str(path), 'train.epochs': 0.05, 'train.batch_size': 8}
  config.update_from_flattened_dict(small | run | {'data.validation': 0.1} | changes)
  return resolve(config)


@pytest.mark.slow
def test_the_loss_of_texts_counts_the_masked_tokens_only(tmp_path):
  path = tmp_path / 'one.txt'
  path.write_text('the cat sat on the mat. ' * 500)
  save_untrained(text_config(path, task='masked_token'), tmp_path / 'run', scale=0.3)
  config = text_config(path, task='masked_token', **taught(tmp_path / 'run'))
  made, params, totals = one_step(config)
  found = reference(made, params, lambda targets: np.asarray(targets[1]))
  np.testing.assert_allclose(float(totals.loss), found, rtol=1e-5)
  with pytest.raises(UserError, match='was trained for task masked_token, and the run has task next_token'):
    make_plan(text_config(path, **taught(tmp_path / 'run')))
  with pytest.raises(UserError, match=r'takes windows of 24 tokens, and data.length is 48'):
    make_plan(text_config(path, task='masked_token', **{'data.length': 48}, **taught(tmp_path / 'run')))
  path.write_text('Dogs lay on the log; a fox ran! ' * 500)
  with pytest.raises(
    UserError, match=r'has another vocabulary \(characters, \d+\) than text_file \(characters, \d+\)'
  ):
    make_plan(text_config(path, task='masked_token', **taught(tmp_path / 'run')))


def test_a_student_that_equals_its_teacher_has_nothing_to_learn(toy, tmp_path):
  levels = LEVELS | {'train.label_smoothing': 0.1}
  save_untrained(toy('model=vit', **levels), tmp_path / 'run', scale=0.3)
  config = toy('model=vit', **levels, **taught(tmp_path / 'run', weight=1.0), init_from=str(tmp_path / 'run'))
  _, _, totals = one_step(config)
  assert abs(float(totals.loss)) < 1e-6 and float(totals.gradient_norm) < 1e-5


def test_only_the_first_process_looks_at_teacher_json(tmp_path, monkeypatch):
  monkeypatch.setattr(processes, 'is_first', lambda: False)
  with startup.claimed(tmp_path / 'run', types.SimpleNamespace(teacher=types.SimpleNamespace(claim=None)), {}):
    assert not (tmp_path / 'run').exists()


def test_without_a_weight_the_run_is_that_without_a_teacher(toy):
  with pytest.warns(Notice, match=r'train.teacher=nowhere has no effect, because train.teacher_weight is 0'):
    made = prepare(toy('model=vit', **LEVELS, **taught('nowhere', weight=0.0)), devices=ONE)
  assert made.teacher is None and made.objective.distillation is None
  assert made.resident is made.inputs['train'].resident


@pytest.mark.slow
def test_a_run_goes_on_as_if_it_had_not_stopped_and_counts_the_teacher(toy, teacher, tmp_path, monkeypatch):
  config = toy('model=vit', **LEVELS, **taught(teacher), **{'train.epochs': 0.8, 'train.average': 0.9})
  result = train(config, tmp_path / 'whole', QUIET, ONE)
  with monkeypatch.context() as patch:
    stop_at(patch, 5)
    assert train(config, tmp_path / 'stopped', QUIET, ONE) is None
  save_untrained(toy('model=vit', **OTHER_LEVELS, **{'model.width': 24}), tmp_path / 'other', scale=0.3, seed=1)
  plan = make_plan(toy('model=vit', **LEVELS, **taught(tmp_path / 'other')))
  with pytest.raises(UserError, match=r'holds other weights than when the run in .* began'):
    plan.teacher.claim(tmp_path / 'stopped')
  assert train(config, tmp_path / 'stopped', QUIET, ONE) is not None
  assert_same_run(tmp_path / 'whole', tmp_path / 'stopped')
  flops = 3 * flops_per_example(plan.model, (8, 8, 1)) + flops_per_example(plan.teacher.network.model, (8, 8, 1))
  assert result['train_operations'] == flops * config.train.batch_size * result['steps']


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'train.teacher_weight': 0.5}, r'train.teacher_weight is 0.5 without a teacher: set train.teacher'),
    (taught('nowhere'), 'train.teacher=nowhere holds no weights: expected a run folder'),
    (taught('weights.npz'), 'train.teacher=weights.npz is a file: expected a run folder'),
    ({'data.image_size': 16}, 'takes images of 8×8×1, and those of digits have 16×16×1: name a network'),
  ],
  ids=['no teacher', 'no folder', 'a file', 'other images'],
)
def test_what_cannot_teach_is_refused(toy, teacher, changes, message):
  with pytest.raises(UserError, match=message):
    make_plan(toy('model=vit', **LEVELS, **({} if 'train.teacher_weight' in changes else taught(teacher)), **changes))


def test_a_teacher_of_other_classes_is_refused(toy, teacher, monkeypatch):
  plan = make_plan(toy('model=vit', **LEVELS, **taught(teacher)))
  names = tuple(f'other {number}' for number in range(10))
  for classes, fits in ((names, True), (names[:9], False)):  # the digits are named by their numbers
    assert (not _fault_of(plan, classes)) == fits
  assert 'has other classes (9: other 0, other 1, other 2, …) than digits' in _fault_of(plan, names[:9])


def _fault_of(plan, classes):
  network = dataclasses.replace(
    plan.teacher.network, data=dataclasses.replace(plan.teacher.network.data, classes=classes)
  )
  return _fault(network, plan.config.task, plan.task)
