import pickle

import jax
import numpy as np
import pytest

from hbf.data.pipeline.order import EvalOrder, TrainOrder


@pytest.mark.parametrize(('examples', 'batch_size'), [(10, 4), (12, 4), (3, 8), (1, 5), (100, 7)])
def test_every_epoch_of_the_stream_is_a_permutation(examples, batch_size):
  order = TrainOrder(0, examples, batch_size)
  steps = -(-5 * examples // batch_size)
  stream = np.concatenate([order(step) for step in range(steps)])
  epochs = stream[: 5 * examples].reshape(5, examples)
  assert stream.dtype == np.int32
  np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(examples), (5, 1)))


def test_epochs_and_seeds_differ():
  epochs = {tuple(TrainOrder(seed, 20, 20)(step)) for seed in (0, 1, -1, 2**64 + 5) for step in range(3)}
  assert len(epochs) == 12


def test_step_is_the_whole_state():
  order = TrainOrder(7, 50, 8)
  forward = [order(step) for step in range(40)]
  other = pickle.loads(pickle.dumps(order))
  for step in reversed(range(40)):
    np.testing.assert_array_equal(other(step), forward[step])


def test_a_batch_straddles_epochs():
  n = 10
  batch = TrainOrder(3, n, 8)(1)
  np.testing.assert_array_equal(batch, np.concatenate([TrainOrder(3, n, n)(0)[8:], TrainOrder(3, n, n)(1)[:6]]))


def test_far_steps_are_exact():
  order = TrainOrder(0, 1_000, 1_000)
  np.testing.assert_array_equal(np.sort(order(10**8)), np.arange(1_000))


@pytest.mark.parametrize(('examples', 'batches'), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2)])
def test_eval_order_has_every_example_once_and_pads(examples, batches):
  order = EvalOrder(examples, 8)
  assert len(order) == batches
  stream = np.concatenate([np.zeros(0, int), *(order(step) for step in range(batches))])
  np.testing.assert_array_equal(stream[:examples], np.arange(examples))
  assert (stream[examples:] == -1).all()


@pytest.mark.parametrize(('examples', 'batch_size', 'step'), [(20, 8, 0), (20, 8, 7), (1_281_167, 4096, 100_003)])
def test_epochs_of_rows_are_those_of_their_positions(examples, batch_size, step):
  """The test also runs inside jit, where the last position would exceed 32 bits."""
  order = TrainOrder(0, examples, batch_size)
  expected = (step * batch_size + np.arange(batch_size)) // examples
  np.testing.assert_array_equal(order.epochs(step), expected)
  found = jax.jit(order.epochs)(step)
  assert found.dtype == np.int32
  np.testing.assert_array_equal(found, expected)
  assert len({*expected}) == 2 or examples > 20 or step == 0
