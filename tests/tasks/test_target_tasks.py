"""Tests of the tasks multi_label and regression: their losses, their batches and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.metrics import log_loss

import hbf
from hbf.config.resolve import check, resolve
from hbf.data.datasets import from_arrays
from hbf.data.images.sources import Subset
from hbf.data.pipeline.host import image_shape, target_shape
from hbf.data.pipeline.inputs import abstract_batch, gather, make_input
from hbf.data.pipeline.order import EvalOrder
from hbf.errors import UserError
from hbf.tasks.registry import make_task

NAMES = ('one', 'two', 'three')


def data(task, n=37):
  generator = np.random.default_rng(0)
  images = generator.integers(0, 256, (n, 4, 6, 1), np.uint8)
  labels = generator.random((n, 3)) < 0.5
  values = generator.normal((5.0, -100.0, 0.0), (1.0, 20.0, 1e-3), (n, 3))
  return hbf.ArrayData(images, y := labels if task == 'multi_label' else values, images[:9], y[:9], NAMES)


def made(task, **changes):
  config = hbf.get_config('arrays', task=task)
  with config.unlocked():
    config.update_from_flattened_dict({'data.validation': 0.2, 'data.transforms': (), **changes})
  config, dataset = resolve(config), from_arrays(data(task))
  check(config)
  task = make_task(config, dataset)
  config = task.measure(config.copy_and_resolve_references().unlock(), None)
  return make_task(config, dataset), config


@pytest.mark.parametrize('task', ['multi_label', 'regression'])
@pytest.mark.parametrize(('kind', 'devices'), [('device', 1), ('device', 8), ('stream', 8)])
def test_batches_have_the_vectors_of_their_images(task, kind, devices):
  source = Subset(from_arrays(data(task)).splits['train'], np.arange(3, 30))
  mesh = Mesh(np.asarray(jax.devices()[:devices]), ('data',))
  sharding = NamedSharding(mesh, PartitionSpec('data'))
  split = make_input(kind, source, sharding, workers=0, resident_bytes=0)
  order = EvalOrder(len(source), 16)
  *_, last = split.batches(order, 0, len(order))
  with jax.set_mesh(mesh):
    found = jax.jit(gather)(split.resident, last)
  rows = np.asarray(found['index'])
  expected = [source[row][1] if row >= 0 else np.zeros(3) for row in rows]
  np.testing.assert_array_equal(found['label'], np.array(expected, np.float32))
  shape = abstract_batch(split.resident, image_shape(source), sharding, 16, target_shape=target_shape(source))
  assert {name: (z.shape, z.dtype) for name, z in shape.items()} == {
    name: (z.shape, z.dtype) for name, z in last.items()
  }


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
def test_the_loss_of_labels_is_the_mean_cross_entropy(smoothing):
  task, _ = made('multi_label', **{'train.label_smoothing': smoothing})
  labels = jnp.asarray(np.random.default_rng(1).random((20, 3)) < 0.5, jnp.float32)
  logits = jax.random.normal(jax.random.key(0), labels.shape)
  loss, right = task.loss(logits, (labels, task.loss_targets(labels)))
  p, y = (np.asarray(z, np.float64).ravel() for z in (jax.nn.sigmoid(logits), labels))
  against = (1 - smoothing / 2) * log_loss(y, p) + smoothing / 2 * log_loss(1 - y, p)
  assert loss == pytest.approx(against, rel=1e-5)
  assert right == ((logits > 0) == labels).sum()


@pytest.mark.parametrize('huber', [0.0, 0.5])
def test_the_loss_of_values_is_of_standardized_ones(huber):
  means, deviations = (5.0, -100.0, 0.0), (1.0, 20.0, 1e-3)
  changes = {'data.target_mean': means, 'data.target_std': deviations, 'train.huber': huber}
  task = make_task(made('regression', **changes)[1], from_arrays(data('regression')))
  values = jnp.asarray(data('regression').y_train)
  logits = jax.random.normal(jax.random.key(0), values.shape)
  found, right = task.loss(logits, (values, task.loss_targets(values)))
  error = np.abs(logits - (np.asarray(values, np.float64) - means) / deviations)
  squares = np.square(error)
  expected = np.where(error > huber, huber * (error - huber / 2), squares / 2) if huber else squares
  assert found == pytest.approx(expected.mean(), rel=1e-4) and right == 0
  np.testing.assert_allclose(task.outputs(task.loss_targets(values), task.about()), values, rtol=1e-5, atol=1e-6)


def test_given_levels_of_pixels_are_kept():
  _, config = made('regression', **{'data.mean': (0.1,), 'data.std': (0.2,)})
  assert (config.data.mean, config.data.std) == ((0.1,), (0.2,))


def test_targets_are_measured_without_the_held_out_images():
  task, config = made('regression')
  source = task.splits(0.2)['train']
  inputs = task.open(source, NamedSharding(Mesh(np.asarray(jax.devices()[:1]), ('data',)), PartitionSpec('data')))
  config.data.update(target_mean=(), target_std=())
  measured = task.measure(config, inputs).data
  values = np.array([source[row][1] for row in range(len(source))], np.float64)
  assert len(values) < 37
  np.testing.assert_allclose(measured.target_mean, values.mean(axis=0))
  np.testing.assert_allclose(measured.target_std, values.std(axis=0))


@pytest.mark.parametrize(
  ('task', 'changes', 'message'),
  [
    ('regression', {'data.mix': (('mixup', 1.0, 0.5),)}, 'data.mix is .*, which task regression has no use for'),
    ('regression', {'train.label_smoothing': 0.1}, 'train.label_smoothing is 0.1.*set it to 0.0'),
    ('regression', {'data.target_mean': (1.0,), 'data.target_std': (1.0,)}, 'for each of the 3 targets of arrays'),
    ('regression', {'data.target_mean': (1.0,)}, 'give both data.target_mean and data.target_std'),
    ('regression', {'data.target_std': (1.0, 0.0, 1.0)}, 'a number above 0 for each target'),
    ('multi_label', {'data.balance': 'weights'}, "data.balance is 'weights'.*set it to ''"),
    ('multi_label', {'data.stratify': True}, 'data.stratify is True, which task multi_label has no use for'),
    ('multi_label', {'train.teacher': 'x', 'train.teacher_weight': 0.5}, "train.teacher is 'x'"),
  ],
)
def test_options_without_a_meaning_are_refused(task, changes, message):
  with pytest.raises(UserError, match=message):
    made(task, **changes)


def test_data_of_another_task_are_refused_and_the_task_is_named():
  config = resolve(hbf.get_config('arrays'))
  with pytest.raises(UserError, match=r"arrays has labels, and task classification .*task='multi_label'.*argmax"):
    make_task(config, from_arrays(data('multi_label')))
  with pytest.raises(UserError, match=r"has values, and task multi_label needs labels: .*task='regression'\)$"):
    make_task(resolve(hbf.get_config('arrays', task='multi_label')), from_arrays(data('regression')))
  with pytest.raises(UserError, match='digits has classes, not values; expected task classification'):
    make_task(resolve(hbf.get_config('digits', task='regression')))
  with pytest.raises(UserError, match="unknown task 'next_token': known: classification, multi_label, regression"):
    hbf.get_config('arrays', task='next_token')


def test_a_recipe_leaves_out_what_a_task_can_not_use():
  config = hbf.get_config('arrays', recipe='strong', task='regression')
  assert (config.data.mix, config.train.label_smoothing, config.data.stratify, config.train.huber) == (
    (),
    0,
    False,
    0,
  )
  labels = hbf.get_config('arrays', recipe='strong', task='multi_label')
  assert labels.data.mix and labels.train.label_smoothing and 'huber' not in labels.train


def test_a_constant_target_is_refused():
  images = np.zeros((8, 8, 8, 1), np.uint8)
  values = np.stack([np.arange(8.0), np.full(8, 0.1)], 1)
  dataset = from_arrays(hbf.ArrayData(images, values, images, values, ('height', 'age')))
  config = resolve(hbf.get_config('arrays', task='regression'))
  task = make_task(config, dataset)
  inputs = task.open(
    dataset.splits['train'], NamedSharding(Mesh(np.asarray(jax.devices()[:1]), ('data',)), PartitionSpec('data'))
  )
  with pytest.raises(UserError, match='target age has the same value in all training images: leave it out'):
    task.measure(config, inputs)
