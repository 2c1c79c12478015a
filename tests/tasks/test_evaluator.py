"""Tests that every example is evaluated once, on any number of devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hbf.data.images.sources import Subset
from hbf.data.pipeline.inputs import make_input
from hbf.tasks.evaluator import Evaluator
from hbf.tasks.registry import make_task
from hbf.training.experiment import make_evaluator
from hbf.training.sharding import make_mesh


def test_same_integers_on_one_and_eight_devices_and_in_a_loop(toy):
  config = toy('model=vit', **{'data.mean': (0.3,), 'data.std': (0.4,)})
  task = make_task(config)
  source = Subset(task.dataset.splits['test'], np.arange(203))  # divided neither by the batch of 40 nor by 8 devices
  model = task.make_model(config.model)
  init = jax.jit(functools.partial(model.init, train=False))
  params = init(jax.random.key(3), jnp.zeros((1, *task.shape)))['params']
  found = []
  for devices, kind, batch_size in ((1, 'device', 40), (8, 'device', 40), (8, 'stream', 208)):
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ('data',))
    replicated = NamedSharding(mesh, PartitionSpec())
    sharding = NamedSharding(mesh, PartitionSpec('data'))
    split = make_input(kind, source, sharding, workers=0, resident_bytes=0)
    evaluator = Evaluator(task, model, batch_size, sharding)
    found.append(evaluator(jax.device_put(params, replicated), split))
  images = np.stack([source[i][0] for i in range(len(source))])
  labels = np.array([source[i][1] for i in range(len(source))])
  logits = jax.jit(functools.partial(model.apply, train=False))({'params': params}, (images / 255 - 0.3) / 0.4)
  loop = int((np.argmax(logits, axis=1) == labels).sum())
  for evaluated in found:
    np.testing.assert_array_equal(evaluated.per_example['labels'], labels)
    np.testing.assert_array_equal(evaluated.per_example['predictions'], np.argmax(logits, axis=1))
  mesh = make_mesh(jax.devices()[:8], toy().mesh)
  assert (
    make_evaluator(config, task, model, mesh, {'train': range(999), 'test': source}).batch_size == 208
  )  # least padding
  first, *others = [evaluated.summary | task.details(evaluated.counts, evaluated.per_example) for evaluated in found]
  assert (first['n'], first['correct']) == (203, loop)
  for summary in others:
    assert (summary['n'], summary['correct'], summary['confusion']) == (203, loop, first['confusion'])
    assert summary['nll'] == pytest.approx(first['nll'], rel=1e-5)


def test_the_outputs_of_copies_are_averaged_on_any_number_of_devices(toy):
  config = toy('model=vit', **{'data.mean': (0.3,), 'data.std': (0.4,), 'evaluate.copies': 'mirror_shift'})
  task = make_task(config)
  source = Subset(task.dataset.splits['test'], np.arange(203))
  model = task.make_model(config.model)
  params = jax.jit(functools.partial(model.init, train=False))(jax.random.key(3), jnp.zeros((1, *task.shape)))[
    'params'
  ]
  images = (np.stack([source[i][0] for i in range(len(source))]) / 255 - 0.3) / 0.4
  apply = jax.jit(functools.partial(model.apply, train=False))
  copies, weights = task.copies(jnp.asarray(images, jnp.float32))
  logits = sum(weight * np.asarray(apply({'params': params}, z)) for weight, z in zip(weights, copies, strict=True))
  labels = np.array([source[i][1] for i in range(len(source))])
  nll = -float(jax.nn.log_softmax(logits)[np.arange(203), labels].mean())
  for devices in (1, 8):
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ('data',))
    replicated = NamedSharding(mesh, PartitionSpec())
    sharding = NamedSharding(mesh, PartitionSpec('data'))
    split = make_input('device', source, sharding, workers=0, resident_bytes=0)
    found = Evaluator(task, model, 40, sharding, task.copies)(jax.device_put(params, replicated), split)
    assert found.summary['nll'] == pytest.approx(nll, rel=1e-5)
    assert found.summary['correct'] == (logits.argmax(axis=1) == labels).sum()
