"""Tests of the operations counted in traced programs, against counts by hand and XLA's own."""

import functools

import jax
import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict

from hbf.config.recipes import make_config
from hbf.config.resolve import resolve
from hbf.models.build import abstract_params, build_model, flops_per_example
from hbf.models.flops import PRODUCTS, count_flops, count_products

A, B = jax.ShapeDtypeStruct((5, 7), jnp.float32), jax.ShapeDtypeStruct((7, 3), jnp.float32)
PRODUCT = 2 * 5 * 7 * 3


def looped(a, b):
  """Compute four products in a loop, each of which uses the one before."""
  return jax.lax.scan(lambda c, _: (a @ b @ (c.T @ a @ b), None), jnp.ones((5, 3)), length=4)[0]


@jax.custom_vjp
def by_hand(a, b):
  return a @ b


by_hand.defvjp(lambda a, b: (a @ b, (a, b)), lambda res, g: (g @ res[1].T, res[0].T @ g))


@pytest.mark.parametrize(
  ('function', 'expected'),
  [
    (jnp.matmul, PRODUCT),
    (lambda a, b: jnp.exp(a @ b) + 1, PRODUCT + 2 * 15),
    (lambda a, b: (a @ b).sum(), PRODUCT + 15),
    (lambda a, b: (a.T.reshape(7, 5)[:, ::-1].T > 0) @ b, PRODUCT),
    (lambda a, b: (a.astype(jnp.int32) + 1) * 2, 0),
    (jax.jit(jnp.matmul), PRODUCT),
    (jax.checkpoint(jnp.matmul), PRODUCT),
    (by_hand, PRODUCT),
    (jax.vmap(jnp.dot, (0, None)), PRODUCT),
    (lambda a, b: jax.lax.cond(a[0, 0] > 0, lambda: a @ b, lambda: jnp.ones((5, 3))), PRODUCT),
    (lambda a, b: jax.lax.platform_dependent(a, b, cuda=lambda a, b: 2 * (a @ b), default=jnp.matmul), PRODUCT),
    (lambda a, b: jax.lax.fori_loop(0, 6, lambda _, c: c + a @ b, jnp.zeros((5, 3))), 6 * (PRODUCT + 15)),
  ],
)
def test_count_is_that_by_hand(function, expected):
  assert count_flops(function, A, B) == expected


def test_products_count_as_on_the_platform():
  """A branch of the platform counts if it has products. Otherwise the last branch counts."""
  high = functools.partial(jnp.matmul, precision='high')

  def function(a, b):
    return jax.lax.platform_dependent(
      a, b, cuda=lambda a, b: high(a, b) + high(a, b), tpu=lambda a, b: a[:, :3], default=exact
    )

  exact = functools.partial(jnp.matmul, precision='highest')
  jaxpr = jax.make_jaxpr(function)(A, B).jaxpr
  assert count_products(jaxpr, 'cuda') == {'float32': 2 * PRODUCT}
  assert count_products(jaxpr, 'tpu') == count_products(jaxpr) == {'highest': PRODUCT}


def test_loops_count_as_often_as_they_run():
  assert count_flops(looped, A, B, costs=PRODUCTS) == 4 * 2 * (5 * 7 * 3 + 3 * 5 * 7 + 3 * 7 * 3 + 5 * 3 * 3)


def test_gradient_of_a_product_counts_its_products():
  gradient = jax.grad(lambda a, b: by_hand(a, b).sum(), (0, 1))
  assert count_flops(gradient, A, B, costs=PRODUCTS) == 3 * PRODUCT


@pytest.mark.parametrize('groups', [1, 2])
def test_a_convolution_is_a_product_of_its_patches(groups):
  images, kernel = (jax.ShapeDtypeStruct(z, jnp.float32) for z in ((2, 8, 8, 4), (3, 3, 4 // groups, 6)))
  layout = {'dimension_numbers': ('NHWC', 'HWIO', 'NHWC'), 'feature_group_count': groups}
  convolve = functools.partial(jax.lax.conv_general_dilated, window_strides=(1, 1), padding='VALID', **layout)
  assert count_flops(convolve, images, kernel) == 2 * (2 * 6 * 6 * 6) * (3 * 3 * 4 // groups)


def config(model: str, recipe: str = 'small') -> ConfigDict:
  return resolve(make_config(f'model={model},recipe={recipe}', {'name': 'cifar10'})).model


@pytest.mark.parametrize('model', ['hyperbf', 'vit', 'pooling', 'amlp'])
def test_near_what_xla_counts(model):
  """The counts differ a little: XLA leaves out exponentials, and counts masks and conversions."""
  built, image = build_model(config(model), 10), jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
  forward = jax.jit(lambda params, x: built.apply({'params': params}, x, train=False))
  expected = forward.lower(abstract_params(built, (32, 32, 3)), image).cost_analysis()['flops']
  assert abs(flops_per_example(built, (32, 32, 3)) / expected - 1) < 0.01


def test_asks_no_backend(monkeypatch):
  """The count must not use the cost analysis of a lowered program, which is missing on CUDA and TPU."""
  monkeypatch.setattr(jax.stages.Lowered, 'cost_analysis', lambda self: None)
  assert flops_per_example(build_model(config('hyperbf'), 10), (32, 32, 3)) > 1e6


def test_the_form_of_a_sum_changes_little():
  """A Pallas kernel pads blocks and recomputes numbers. The count is that of the model's operations."""
  blocks, pallas = config('hyperbf'), config('hyperbf')
  with pallas.unlocked():
    pallas.stage2.implementation = 'pallas'
  counts = [flops_per_example(build_model(c, 10), (32, 32, 3)) for c in (blocks, pallas)]
  assert abs(counts[1] / counts[0] - 1) < 0.01
