"""Every example once, on any number of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hbf.data.inputs import make_input
from hbf.data.sources import Subset
from hbf.evaluation.evaluator import Evaluator
from hbf.models.build import build_model
from hbf.training.experiment import load_dataset


@pytest.mark.parametrize('kind', ['device', 'stream'])
def test_same_integers_on_one_and_eight_devices_and_in_a_loop(toy, kind):
  config = toy()
  dataset = load_dataset(config)
  source = Subset(dataset.splits['test'], np.arange(203))  # divided neither by the batch of 40 nor by 8 devices
  model = build_model(config.model, len(dataset.classes))
  mean, std = (0.3,), (0.4,)
  params = model.init(jax.random.key(3), jnp.zeros((1, *dataset.image_shape)), train=False)['params']
  found = []
  for devices in (1, 8):
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ('data',))
    replicated = NamedSharding(mesh, PartitionSpec())
    split = make_input(kind, source, NamedSharding(mesh, PartitionSpec('data')), workers=0, resident_bytes=0)
    evaluator = Evaluator(model, mean, std, 40, replicated)
    found.append(evaluator(jax.device_put(params, replicated), split))
  images = np.stack([source[i][0] for i in range(len(source))])
  labels = np.array([source[i][1] for i in range(len(source))])
  logits = model.apply({'params': params}, (images / 255 - 0.3) / 0.4, train=False)
  loop = int((np.argmax(logits, axis=1) == labels).sum())
  for _, of_examples, predictions in found:
    np.testing.assert_array_equal(of_examples, labels)
    np.testing.assert_array_equal(predictions, np.argmax(logits, axis=1))
  summaries = [evaluated.summary for evaluated in found]
  assert [summary['correct'] for summary in summaries] == [loop, loop]
  assert summaries[0]['n'] == summaries[1]['n'] == 203
  assert summaries[0]['confusion'] == summaries[1]['confusion']
  assert summaries[0]['nll'] == pytest.approx(summaries[1]['nll'], rel=1e-5)
