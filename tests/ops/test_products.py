"""Tests of products in parts: what an NVIDIA GPU computes with TF32, emulated on the CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.keywords import hyperbf, hyperbf_plain

from hbf.ops import products

N, A, D, V = 96, 48, 24, 8
EXACT = (jax.lax.Precision.HIGHEST, (jax.lax.Precision.HIGHEST,) * 2)


def to_tf32(z):
  """Round float32 numbers to 10 bits. The cotangent isn't rounded again: its product rounds its own factors."""
  if z.dtype != jnp.float32:
    return z
  rounded = functools.partial(jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=10)
  return jax.custom_derivatives.linear_call(lambda _, z: rounded(z), lambda _, cotangent: cotangent, (), z)


@pytest.fixture
def tensor_cores(monkeypatch):
  """Compute the forms for NVIDIA GPUs, and round the factors of products to TF32 as those do by default."""
  bind = jax.lax.dot_general_p.bind

  def rounded(a, b, **params):
    if params['precision'] not in EXACT:
      a, b = to_tf32(a), to_tf32(b)
    return bind(a, b, **params)

  monkeypatch.setattr(jax.lax.dot_general_p, 'bind', rounded)
  monkeypatch.setattr(products, '_SPLIT_FROM', 16)
  monkeypatch.setattr(
    jax.lax, 'platform_dependent', lambda *arrays, **forms: forms.get('cuda', forms['default'])(*arrays)
  )


def arguments(sigma, dtype):
  """Return tokens, centers near some of them, coefficients, σ and metric weights, and a cotangent."""
  rng = np.random.default_rng(0)
  points = rng.normal(size=(N, D))
  centers = points[:A] + 0.1 * rng.normal(size=(A, D))
  arrays = points, centers, rng.normal(size=(A, V)), np.full((1, A), sigma), np.ones(D)
  return [jnp.asarray(z, dtype) for z in arrays], jnp.asarray(rng.normal(size=(N, V)), dtype)


def errors(operator, normalization, sigma):
  """Return the relative errors of the value and of all gradients in float32, against float64."""

  def function(points, centers, coefficients, sigma, weights):
    how = {'kernel': 'gaussian', 'metric': 'diagonal', 'normalization': normalization}
    return operator(points, centers, coefficients, sigma=sigma, weights=weights, **how)

  @jax.jit
  def value_and_pulled(arrays, cotangent):
    value, pull = jax.vjp(function, *arrays)
    return value, *pull(cotangent)

  found = []
  with jax.enable_x64(True):
    for dtype in (jnp.float32, jnp.float64):
      found.append([np.asarray(z, np.float64) for z in value_and_pulled(*arguments(sigma, dtype))])
  return [np.linalg.norm(one - other) / np.linalg.norm(other) for one, other in zip(*found, strict=True)]


@pytest.mark.parametrize('operator', [hyperbf, hyperbf_plain])
@pytest.mark.parametrize('normalization', ['none', 'sum', 'layer'])
def test_distances_and_their_gradients_survive_tf32(operator, normalization, tensor_cores):
  """Distances are 50 times smaller than the norms of which they are differences. Yet no error is magnified."""
  assert max(errors(operator, normalization, sigma=1.0)) < 2e-3  # four roundings of TF32


def test_responses_that_hardly_differ_survive_tf32(tensor_cores):
  assert max(errors(hyperbf, 'layer', sigma=50.0)) < 2e-3


def test_three_products_are_nearly_exact(tensor_cores):
  rng = np.random.default_rng(1)
  a, b = (jnp.asarray(rng.normal(size=(n, D)), jnp.float32) for n in (N, A))
  expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
  norms = np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=1)
  assert np.max(np.abs(products.products(a, b) - expected) / norms) < 2**-21
  assert np.max(np.abs(products.einsum('nd,ad->na', a, b) - expected) / norms) > 2**-14  # rounded as by a GPU


@pytest.mark.parametrize(
  ('points', 'centers', 'dtype', 'split'),
  [
    (512, 512, 'float32', True),
    (512, 64, 'float32', False),
    (64, 512, 'float32', False),
    (512, 512, 'bfloat16', False),
  ],
)
def test_large_products_for_an_nvidia_gpu_are_in_parts(points, centers, dtype, split):
  """Count products in programs by their precision: HIGHEST for exact ones of float32, and HIGH for those in parts."""
  a, b = (jax.ShapeDtypeStruct((n, 8), dtype) for n in (points, centers))
  step = jax.jit(jax.grad(lambda a, b: jnp.sum(products.products(a, b) ** 2), (0, 1))).trace(a, b)
  texts = {platform: step.lower(lowering_platforms=(platform,)).as_text() for platform in ('cuda', 'cpu', 'tpu')}
  assert texts['cuda'].count('[HIGH, HIGH]') == (3 if split else 0)
  assert ('HIGHEST' in texts['cuda']) == (not split)
  assert not any('[HIGH, HIGH]' in texts[platform] for platform in ('cpu', 'tpu'))


def test_gpus_without_tf32_multiply_float32(monkeypatch):
  a = jnp.ones((512, 8))
  for capability, split in (('8.0', True), ('7.5', False), ('gfx90a', True)):
    device = type('Device', (), {'compute_capability': capability})
    monkeypatch.setattr(jax, 'local_devices', functools.partial(list, [device]))
    # A function of its own, because JAX remembers the traces of a function.
    program = jax.make_jaxpr(lambda a: products.products(a, a))(a)
    assert ('branches_platforms' in str(program)) == split
