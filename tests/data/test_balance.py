"""Classes of different sizes: data.balance."""

import jax.numpy as jnp
import numpy as np
import pytest
from in_memory import ArraySource

from hbf.data.datasets import from_arrays
from hbf.data.images.arrays import ArrayData
from hbf.data.images.sources import Subset, labels
from hbf.data.pipeline.order import BalancedOrder
from hbf.errors import UserError
from hbf.tasks.registry import make_task
from hbf.training.experiment import make_plan

SIZES = (2, 7, 0, 31)


def stream(order, count):
  return np.concatenate([order(step) for step in range(count // order.batch_size)])


@pytest.fixture(scope='module')
def unequal():
  return np.random.default_rng(0).permutation(np.repeat(np.arange(len(SIZES)), SIZES))


def test_classes_and_the_images_of_a_class_are_equally_frequent(unequal):
  order = BalancedOrder.from_labels(3, unequal, 6)
  found = stream(order, 3 * 2 * 7 * 31)
  blocks = np.sort(unequal[found].reshape(-1, 3), axis=1)
  assert (blocks == [0, 1, 3]).all()
  assert len(np.unique(unequal[found].reshape(-1, 3), axis=0)) == 6  # in all orders
  for label, size in enumerate(SIZES):
    counts = np.bincount(found, minlength=len(unequal))[unequal == label]
    assert (counts == 2 * 7 * 31 // max(size, 1)).all()


def test_the_examples_of_a_step_depend_on_the_seed_and_the_step_only(unequal):
  whole = stream(BalancedOrder.from_labels(3, unequal, 5), 60)
  np.testing.assert_array_equal(whole, stream(BalancedOrder.from_labels(3, unequal, 12), 60))
  np.testing.assert_array_equal(BalancedOrder.from_labels(3, unequal, 5)(7), whole[35:40])
  assert (whole != stream(BalancedOrder.from_labels(4, unequal, 5), 60)).any()


def test_a_part_of_a_source_knows_its_labels_without_images(unequal):
  class Unseen(ArraySource):
    def read_labels(self):
      return self.labels

    def __getitem__(self, index):
      raise AssertionError('an image is read')

  source = Unseen(np.zeros((len(unequal), 1)), unequal)
  indices = np.array([3, 1, 20])
  np.testing.assert_array_equal(labels(Subset(Subset(source, np.arange(30)[::-1]), indices)), unequal[29 - indices])


def dataset(unequal):
  images = np.zeros((len(unequal), 4, 4, 1), np.uint8)
  return from_arrays(ArrayData(images, unequal, images[:4], unequal[:4], ('a', 'b', 'c', 'd')))


def task_of(toy, unequal, **changes):
  changes = {'model.patch': 2, 'train.batch_size': 8, 'data.validation': 0.0, **changes}
  config = toy('model=vit', **changes)
  return config, make_task(config, dataset(unequal))


def test_weights_are_inverse_frequencies(toy, unequal):
  smoothing = {'train.label_smoothing': 0.2}
  _, task = task_of(toy, unequal, **smoothing, **{'data.balance': 'weights'})
  np.testing.assert_allclose(task.class_weights, [40 / 3 / 2, 40 / 3 / 7, 0, 40 / 3 / 31], rtol=1e-6)
  np.testing.assert_allclose(task.class_weights[unequal].mean(), 1, rtol=1e-6)
  random = np.random.default_rng(1)
  logits, mixed = random.normal(size=(5, 4)), random.dirichlet(np.ones(4), 5)
  log_q = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  losses = -((0.8 * mixed + 0.05) * log_q).sum(-1)
  targets = jnp.zeros(5, jnp.int32), jnp.asarray(mixed, jnp.float32)
  found, _ = task.loss(jnp.asarray(logits, jnp.float32), targets)
  np.testing.assert_allclose(found, (losses * (mixed @ task.class_weights)).mean(), rtol=1e-5)
  _, plain = task_of(toy, unequal, **smoothing)
  np.testing.assert_allclose(plain.loss(jnp.asarray(logits, jnp.float32), targets)[0], losses.mean(), rtol=1e-5)


def test_a_run_has_the_order_that_it_asks_for(toy, unequal):
  config, task = task_of(toy, unequal, **{'data.balance': 'sampling'})
  source = make_plan(config, dataset=dataset(unequal)).splits['train']
  order = task.train_order(source, 3, 6)
  np.testing.assert_array_equal(order(5), BalancedOrder.from_labels(3, unequal, 6)(5))
  with pytest.raises(UserError, match='has no epochs, which the transform alternate_flip needs: use flip'):
    task_of(toy, unequal, **{'data.balance': 'sampling', 'data.transforms': (('alternate_flip',),)})
  with pytest.raises(UserError, match=r"data.balance is 'even': expected '', weights or sampling"):
    make_plan(toy('model=vit', **{'data.balance': 'even'}))


def test_copies_of_an_image_in_a_batch_are_transformed_and_mixed_like_others(toy, unequal):
  _, task = task_of(toy, unequal, **{'data.balance': 'sampling'})
  index = jnp.array([3, 5, 3, 8, 3, 5])
  numbers = np.asarray(task.drawn_numbers(index))
  assert len({*numbers}) == 6
  np.testing.assert_array_equal(numbers[[0, 1, 3]], index[np.array([0, 1, 3])])  # as in a batch without copies
  np.testing.assert_array_equal(numbers % len(task.dataset.splits['train']), index)
  _, plain = task_of(toy, unequal)
  np.testing.assert_array_equal(plain.drawn_numbers(index), index)
