"""The gradient noise scale against its definition, on losses whose gradients are known."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hbf.errors import UserError
from hbf.tasks.task import ModelBatch
from hbf.training.experiment import make_plan
from hbf.training.noise import noise_scale
from hbf.training.state import Objective, init_state, make_train_step, repeat_step

BATCH, SIZE = 24, 5

# The loss of an example x is |w - x|² / 2, so its gradient is w - x.
MODEL = types.SimpleNamespace(
  init=lambda key, inputs, train: {'params': {'w': jnp.arange(SIZE, dtype=inputs.dtype)}},
  apply=lambda variables, inputs, train, rngs: variables['params']['w'] - inputs,
)
TASK = types.SimpleNamespace(
  eval_batch=lambda resident, batch: ModelBatch(batch['x'], batch['x']),
  train_batch=lambda keys, resident, batch: ModelBatch(batch['x'], batch['x']),
  loss=lambda logits, targets: ((logits**2).sum(axis=-1).mean() / 2, jnp.zeros((), jnp.int32)),
)


def norms_after(stack, parts, radius=0.0):
  """Return the mean norms over a stack of batches [S, B, D], at a learning rate of 0."""
  objective, optimizer = Objective(TASK, parts, 0, radius=radius, norms=True), optax.sgd(0.0)

  def run(stack):
    state = init_state(MODEL, optimizer, objective, None, {'x': stack[0]})
    return repeat_step(make_train_step(MODEL, optimizer, objective))(state, None, {'x': stack}, len(stack))[0].norms

  return jax.tree.map(lambda z: z / len(stack), jax.jit(run)(stack))


@pytest.mark.parametrize('parts', [2, 6, BATCH])
def test_the_estimates_are_those_of_the_sample_covariance(parts):
  """With parts of b examples, tr Σ is b times the unbiased variance of the means of the parts."""
  stack = np.random.default_rng(0).normal(size=(3, BATCH, SIZE))
  gradients = np.arange(SIZE) - np.stack([stack[:, part::parts].mean(axis=1) for part in range(parts)], axis=1)
  variance = BATCH / parts * gradients.var(axis=1, ddof=1).sum(axis=1).mean()
  squared = (gradients.mean(axis=1) ** 2).sum(axis=1).mean() - variance / BATCH
  found = noise_scale(norms_after(stack, parts), BATCH, parts)
  assert found == {
    'gradient_squared': pytest.approx(squared, rel=1e-4),
    'gradient_variance': pytest.approx(variance, rel=1e-4),
    'noise_scale': pytest.approx(variance / squared, rel=1e-4),
  }


def test_a_known_noise_scale_is_found():
  sigmas = np.array([1.0, 2.0, 0.5, 1.5, 3.0])
  stack = 1.0 + sigmas * np.random.default_rng(1).normal(size=(2000, BATCH, SIZE))
  truth = (sigmas**2).sum() / ((np.arange(SIZE) - 1.0) ** 2).sum()
  assert noise_scale(norms_after(stack, 4), BATCH, 4)['noise_scale'] == pytest.approx(truth, rel=0.03)


def test_sharpness_aware_steps_report_the_gradient_before_their_ascent():
  stack = np.random.default_rng(2).normal(size=(2, BATCH, SIZE))
  jax.tree.map(np.testing.assert_array_equal, norms_after(stack, 2), norms_after(stack, 2, radius=0.5))


def test_without_a_signal_there_is_no_scale():
  gradients = np.array([[1.0], [-1.0]])
  stack = np.arange(SIZE) - np.broadcast_to(gradients, (1, 2, SIZE))
  assert noise_scale(norms_after(stack, 2), 2, 2) == {'gradient_squared': -SIZE, 'gradient_variance': 2 * SIZE}


def test_a_batch_in_one_part_is_refused(toy):
  with pytest.raises(UserError, match=r'log.noise_scale .*train.accumulate is 0: set train.accumulate to 2'):
    make_plan(toy(**{'log.noise_scale': True}))
