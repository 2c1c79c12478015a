"""Tests of the mimetic start of queries and keys against its definition in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hbf.nn.baselines.softmax import SoftmaxAttention
from hbf.nn.gated import GatedHyperBF, GatedSoftmax
from hbf.nn.hyperbf import HyperBFAttention
from hbf.nn.projections import mimetic

WIDTH, HEADS = 24, 3


@pytest.mark.parametrize('heads', [1, HEADS])
def test_products_are_the_best_of_their_rank(heads):
  key, d = jax.random.key(4), WIDTH // heads
  q, k = (np.asarray(z, np.float64).reshape(WIDTH, heads, d) for z in mimetic(key, WIDTH, heads, 0.6, 0.8))
  noise = np.asarray(jax.random.normal(key, (heads, WIDTH, WIDTH)), np.float64) / WIDTH**0.5
  for head in range(heads):
    u, s, v = np.linalg.svd(0.6 * noise[head] + 0.8 * np.eye(WIDTH))
    np.testing.assert_allclose(q[:, head] @ k[:, head].T, (u[:, :d] * s[:d]) @ v[:d], atol=1e-5)
    for z in (q, k):
      np.testing.assert_allclose(z[:, head].T @ z[:, head], np.diag(s[:d]), atol=1e-5)


@pytest.mark.parametrize(
  ('make', 'layer'),
  [
    (lambda **options: SoftmaxAttention(HEADS, **options), 'qkv'),
    (lambda **options: HyperBFAttention(HEADS, **options), 'qkv'),
    (lambda **options: GatedHyperBF(heads=HEADS, hidden=30, **options), 'qk'),
    (lambda **options: GatedSoftmax(heads=HEADS, hidden=30, **options), 'qk'),
  ],
  ids=['softmax', 'hyperbf', 'gated', 'gated softmax'],
)
def test_each_stage_starts_its_queries_and_keys_so_and_all_else_as_without(make, layer):
  def start(strength):
    params = make(mimetic=strength).init(jax.random.key(0), jnp.ones((1, 4, WIDTH)))['params']
    kernel = params[layer].pop('kernel')
    return kernel[:, : 2 * WIDTH], (kernel[:, 2 * WIDTH :], params)

  (found, others), (plain, expected) = start(0.7), start(0.0)
  jax.tree.map(np.testing.assert_array_equal, others, expected)
  assert (found != plain).any()
  q, k = (z.reshape(WIDTH, HEADS, -1) for z in jnp.split(found, 2, axis=1))
  likeness = [jnp.trace(q[:, head] @ k[:, head].T) for head in range(HEADS)]
  assert min(likeness) > 3  # of 24 numbers 0.7 each, less what the rank of 8 leaves out
  for head in range(HEADS):
    np.testing.assert_allclose(q[:, head].T @ q[:, head], k[:, head].T @ k[:, head], atol=1e-5)
