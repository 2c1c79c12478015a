import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops import reference
from ops.keywords import hyperbf, hyperbf_plain, log_responses

from hbf.errors import UserError
from hbf.ops.kernels import KERNELS, SIGNED
from hbf.ops.normalization import NORMALIZATIONS, normalize

N, A, D, V, RANK = 4, 5, 6, 3, 2
EVERY = list(itertools.product(reference.KERNELS, reference.METRICS))
# Distances know only the metric, what follows only the kernel.
EACH = [('gaussian', metric) for metric in reference.METRICS] + [(kernel, 'full') for kernel in reference.KERNELS][1:]
RELATIVE = [normalization for normalization in reference.NORMALIZATIONS if normalization != 'none']


def make(metric, seed=0, lead=()):
  """Return random points, centers, coefficients and weights of a metric, with the leading axes `lead`."""
  rng = np.random.default_rng(seed)
  arrays = [rng.normal(size=(*lead, *shape)).astype('f') for shape in ((N, D), (A, D), (A, V))]
  return (*arrays, reference.metric_weights(rng, metric, D, RANK, lead))


def test_reference_knows_every_kernel_and_normalization():
  assert set(KERNELS) == set(reference.KERNELS)
  assert set(NORMALIZATIONS) == set(reference.NORMALIZATIONS)


@pytest.mark.parametrize('kernel,metric', EVERY)
def test_equals_the_sum_over_centers(kernel, metric):
  points, centers, coefficients, weights = make(metric)
  for normalization in reference.NORMALIZATIONS:
    options = {'kernel': kernel, 'sigma': 1.3, 'metric': metric, 'weights': weights, 'normalization': normalization}
    expected = reference.hyperbf(points, centers, coefficients, log_gain=0.7, **options)
    result = hyperbf(points, centers, coefficients, log_gain=0.7, **options)
    np.testing.assert_allclose(result, expected, rtol=2e-4, atol=2e-5, err_msg=normalization)


@pytest.mark.parametrize('normalization', reference.NORMALIZATIONS)
@pytest.mark.parametrize('kernel', reference.KERNELS)
@pytest.mark.parametrize('masked', [False, True])
def test_equals_the_sum_head_by_head_with_widths_gains_and_mask(masked, kernel, normalization):
  """Each head has its own log-gain, each center its own σ, and the plain form a mask for each point and center."""
  rng = np.random.default_rng(5)
  points, centers, coefficients, weights = make('full', 5, lead=(2,))
  sigma, log_gain = rng.uniform(0.8, 2, size=(2, 1, A)), rng.normal(size=(2, 1, 1))
  mask = rng.random(size=(2, N, A)) < 0.6
  mask[..., 0] = True
  implementation = functools.partial(hyperbf_plain, mask=mask) if masked else hyperbf
  result = implementation(
    points,
    centers,
    coefficients,
    kernel=kernel,
    sigma=sigma.astype('f'),
    metric='full',
    weights=weights,
    normalization=normalization,
    log_gain=log_gain.astype('f'),
  )
  for h in range(2):
    expected = reference.hyperbf(
      points[h],
      centers[h],
      coefficients[h],
      kernel=kernel,
      sigma=sigma[h],
      metric='full',
      weights=weights[h],
      normalization=normalization,
      log_gain=log_gain[h],
      mask=mask[h] if masked else None,
    )
    np.testing.assert_allclose(result[h], expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize('metric', reference.METRICS)
def test_any_shape_of_equal_widths_gives_the_same(metric):
  """σ may be one for each head, or the same numbers for each center. The operator may compute these differently."""
  points, centers, coefficients, weights = make(metric, 6, lead=(2,))
  sigma = np.array([0.8, 1.5], 'f').reshape(2, 1, 1)
  unit = {'kernel': 'gaussian', 'metric': metric, 'weights': weights}
  shared = hyperbf(points, centers, coefficients, sigma=sigma, **unit)
  each = hyperbf(points, centers, coefficients, sigma=np.broadcast_to(sigma, (2, 1, A)), **unit)
  np.testing.assert_allclose(shared, each, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('normalization', reference.NORMALIZATIONS)
@pytest.mark.parametrize('kernel', reference.KERNELS)
def test_gradient_equals_finite_differences_of_the_float64_sum(kernel, normalization):
  """The direction changes points, centers, coefficients, weights and log σ at once."""
  rng = np.random.default_rng(7)
  at = dict(zip(('points', 'centers', 'coefficients', 'weights'), make('full', 7), strict=True))
  at['log_sigma'] = rng.uniform(0, 0.5, size=(1, A)).astype('f')
  along = {name: rng.normal(size=z.shape).astype('f') for name, z in at.items()}
  readout = rng.normal(size=(N, V))

  def value(function, exp, p):
    out = function(
      p['points'],
      p['centers'],
      p['coefficients'],
      kernel=kernel,
      sigma=exp(p['log_sigma']),
      metric='full',
      weights=p['weights'],
      normalization=normalization,
      log_gain=0.5,
    )
    return (out * readout).sum()

  def shifted(step):
    return {name: z.astype(np.float64) + step * along[name] for name, z in at.items()}

  expected = (
    value(reference.hyperbf, np.exp, shifted(1e-5)) - value(reference.hyperbf, np.exp, shifted(-1e-5))
  ) / 2e-5
  gradient = jax.grad(lambda p: value(hyperbf, jnp.exp, p))(at)
  slopes = [float((np.asarray(gradient[name], np.float64) * along[name]).sum()) for name in at]
  np.testing.assert_allclose(sum(slopes), expected, rtol=1e-3, atol=1e-3 * np.abs(slopes).max())


@pytest.mark.parametrize('implementation', ['xla', 'plain', 'pallas'])
@pytest.mark.parametrize('normalization', ['none', 'sum'])
def test_the_gradient_of_beta_is_exact_at_0_and_beside_it(normalization, implementation):
  """At β = 0, σ would be infinite. Each center has a β of its own here."""
  points, centers, coefficients, weights = make('bilinear', 9)
  beta = np.array([[0.0, 1e-24, -1e-24, -0.05, 0.3]], 'f')
  unit = {'kernel': SIGNED, 'metric': 'bilinear', 'weights': weights, 'normalization': normalization}
  gradient = jax.grad(
    lambda beta: hyperbf(points, centers, coefficients, **unit, beta=beta, implementation=implementation).sum()
  )(beta)
  points, centers, coefficients, weights = (np.float64(z) for z in (points, centers, coefficients, weights))
  r2 = reference.squared_distances(points, centers, 'bilinear', weights)
  k, given = np.exp(-beta * r2), np.tile(coefficients.sum(axis=-1), (N, 1))
  if normalization == 'sum':
    k /= k.sum(axis=-1, keepdims=True)
    given = given - (k * given).sum(axis=-1, keepdims=True)
  np.testing.assert_allclose(gradient, -(k * r2 * given).sum(axis=0, keepdims=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  ('scale', 'message'),
  [
    ({'kernel': 'gaussian'}, 'kernel gaussian needs sigma'),
    ({'kernel': 'ball_relu', 'beta': 1.0, 'sigma': 1.0, 'normalization': 'none'}, 'kernel ball_relu needs sigma'),
    ({'kernel': 'gaussian', 'sigma': -1.3}, 'sigma is -1.3: expected a number above 0'),
    ({'kernel': SIGNED, 'metric': 'bilinear', 'sigma': 1.0}, 'has no sigma: expected beta'),
    ({'kernel': SIGNED, 'beta': 1.0}, 'needs metric bilinear, not identity'),
  ],
)
def test_a_kernel_has_sigma_or_beta(scale, message):
  with pytest.raises(UserError, match=message):
    hyperbf(*make('identity')[:3], **scale)


def hostile_points():
  """Return points [4, N, D] and centers [4, A, D] for which a careless formula divides by 0, underflows or takes √0.

  In the four cases, centers equal points, all are one point, or their distances are 1e3 or 1e4.
  """
  points, centers, _, _ = make('identity', 3)
  coincident = np.concatenate([points, points[:1]])
  return (
    np.stack([points, np.ones_like(points), points + 1e3, points + 1e4]),
    np.stack([coincident, np.ones_like(centers), centers, centers]),
  )


@pytest.mark.parametrize('kernel,metric', EACH)
def test_value_and_every_gradient_are_finite(kernel, metric):
  points, centers = hostile_points()
  _, _, coefficients, weights = make(metric, 3)
  if metric == 'bilinear':  # with a free M the Gaussian of a negative form may rightly overflow
    weights = weights @ weights.T

  def total(points, centers, weights, sigma, coefficients, normalization):
    unit = {'kernel': kernel, 'metric': metric, 'weights': weights, 'sigma': sigma}
    out = hyperbf(points, centers, coefficients, normalization=normalization, **unit)
    return (out * (1 + jnp.arange(V))).sum()

  differentiated = (0, 1, 3, 4) if weights is None else (0, 1, 2, 3, 4)
  # What follows the sums knows neither kernel nor metric.
  for normalization in reference.NORMALIZATIONS if (kernel, metric) == EACH[0] else ('none', 'layer'):
    value, gradients = jax.jit(jax.value_and_grad(total, differentiated), static_argnums=5)(
      points, centers, weights, jnp.full((1, A), 0.9), coefficients, normalization
    )
    assert np.isfinite(value), normalization
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients), normalization


@pytest.mark.parametrize('normalization', RELATIVE)
@pytest.mark.parametrize('kernel', ['gaussian', 'laplacian'])
def test_normalized_responses_survive_where_the_kernel_underflows(kernel, normalization):
  """At a distance of 1e4, K is 0 in float32. Divided by the K of the nearest center, it is not."""
  points, centers = (z[3] for z in hostile_points())
  log_k = log_responses(points, centers, kernel=kernel, sigma=1.0)
  assert np.all(np.asarray(normalize(log_k, 'none')) == 0)
  responses = np.asarray(normalize(log_k, normalization))
  nearest = np.asarray(log_k).argmax(-1)
  assert np.all(responses[np.arange(N), nearest] > 0.1)


def exact_log_k():
  """Return log K [N, A] in multiples of 1/8, so that adding an integer below 2¹³ rounds nothing."""
  return jnp.asarray(-np.random.default_rng(2).integers(0, 40, size=(N, A)) / 8, jnp.float32)


def test_sum_responses_are_positive_and_sum_to_one():
  responses = np.asarray(normalize(exact_log_k(), 'sum'))
  assert np.all(responses > 0)
  np.testing.assert_allclose(responses.sum(-1), 1, rtol=1e-6)


def test_rms_responses_are_positive_of_mean_square_one():
  responses = np.asarray(normalize(exact_log_k(), 'rms'))
  assert np.all(responses > 0)
  np.testing.assert_allclose(np.square(responses).mean(-1), 1, rtol=1e-5)


def test_layer_responses_have_mean_zero_and_variance_one():
  responses = np.asarray(normalize(exact_log_k(), 'layer'), np.float64)
  np.testing.assert_allclose(responses.mean(-1), 0, atol=1e-6)
  np.testing.assert_allclose(responses.var(-1), 1, rtol=1e-4)


def test_layer_responses_of_equal_distances_are_zero():
  np.testing.assert_array_equal(normalize(jnp.full((N, A), -3.0), 'layer'), 0)


@pytest.mark.parametrize('normalization', RELATIVE)
def test_normalized_responses_do_not_change_under_a_gain(normalization):
  log_k = exact_log_k()
  expected = normalize(log_k, normalization)
  np.testing.assert_array_equal(expected, normalize(log_k, normalization, 5.0))
  for shift in (-8000.0, 1000.0):
    np.testing.assert_allclose(normalize(log_k + shift, normalization), expected, rtol=1e-6)


def test_unnormalized_responses_are_the_kernel_times_the_gain():
  log_k = exact_log_k()
  np.testing.assert_allclose(normalize(log_k, 'none'), np.exp(log_k), rtol=1e-6)
  np.testing.assert_allclose(normalize(log_k, 'none', jnp.log(7.0)), 7 * np.exp(log_k), rtol=1e-5)


def test_gain_saves_responses_that_underflow_without_it():
  log_k = jnp.full((N, A), -300.0)
  assert np.all(np.asarray(normalize(log_k, 'none')) == 0)
  np.testing.assert_allclose(normalize(log_k, 'none', 300.0), 1)


@pytest.mark.parametrize('normalization', reference.NORMALIZATIONS)
@pytest.mark.parametrize('kernel', reference.KERNELS)
def test_centers_masked_out_equal_absent_centers(kernel, normalization):
  """Values and gradients agree, wherever the masked center is."""
  points, centers, coefficients, _ = make('identity', 9)
  keep = np.array([0, 2, 4])
  mask = np.isin(np.arange(A), keep)
  unit = {'kernel': kernel, 'sigma': 1.1, 'normalization': normalization, 'log_gain': 0.3}
  centers[1], centers[3] = points[0], 1e4  # one would win everything, one is nowhere near

  def total(centers, coefficients, mask=None):
    return jnp.sin(hyperbf_plain(points, centers, coefficients, mask=mask, **unit)).sum()

  with_mask = jax.value_and_grad(total, (0, 1))(centers, coefficients, mask)
  absent = jax.value_and_grad(total, (0, 1))(centers[keep], coefficients[keep])
  np.testing.assert_allclose(with_mask[0], absent[0], rtol=1e-5)
  for masked, expected in zip(with_mask[1], absent[1], strict=True):
    np.testing.assert_allclose(masked[keep], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(masked[~mask], 0)


@pytest.mark.parametrize('normalization', reference.NORMALIZATIONS)
@pytest.mark.parametrize('kernel', ['gaussian', 'laplacian'])
def test_a_point_that_sees_no_center_gets_0_and_other_points_their_gradients(kernel, normalization):
  points, centers, coefficients, _ = make('identity', 11)
  unit = {'kernel': kernel, 'sigma': np.full((1, A), 1.1, 'f'), 'normalization': normalization}
  mask = np.ones((N, A), bool)
  mask[1] = False

  @jax.jit
  def value_and_gradients(*arrays):
    def total(*arrays):
      out = hyperbf(*arrays, mask=mask[: len(arrays[0])], **unit)
      return jnp.sum(jnp.sin(out)), out

    return jax.value_and_grad(total, (0, 1, 2), has_aux=True)(*arrays)

  (_, out), (of_points, *of_others) = value_and_gradients(points, centers, coefficients)
  np.testing.assert_array_equal(out[1], 0)
  np.testing.assert_array_equal(of_points[1], 0)
  seen = np.arange(N) != 1
  mask = np.ones((N - 1, A), bool)
  (_, expected), (of_seen, *of_rest) = value_and_gradients(points[seen], centers, coefficients)
  for result, wanted in zip((out[seen], of_points[seen], *of_others), (expected, of_seen, *of_rest), strict=True):
    np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('kernel', ['laplacian', 'gaussian'])
def test_a_mask_may_have_leading_axes_of_its_own(kernel):
  points, centers, coefficients, _ = make('identity', 12)
  masks = np.random.default_rng(12).random((2, N, A)) < 0.6
  masks[..., 0] = True
  run = jax.jit(functools.partial(hyperbf, kernel=kernel, sigma=1.1))
  expected = [run(points, centers, coefficients, mask=mask) for mask in masks]
  np.testing.assert_allclose(run(points, centers, coefficients, mask=masks), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('normalization', reference.NORMALIZATIONS)
def test_bfloat16_keeps_its_type_and_stays_near_float32(normalization):
  points, centers, coefficients, weights = make('full', 4)
  unit = {'kernel': 'gaussian', 'sigma': 1.5, 'metric': 'full', 'weights': weights, 'normalization': normalization}
  half = [jnp.asarray(z, jnp.bfloat16) for z in (points, centers, coefficients)]
  result = hyperbf(*half, **unit)
  assert result.dtype == jnp.bfloat16
  expected = reference.hyperbf(*(np.asarray(z, np.float64) for z in half), **unit)
  np.testing.assert_allclose(np.asarray(result, np.float64), expected, atol=0.04 * np.abs(expected).max())


@pytest.mark.parametrize('normalization', reference.NORMALIZATIONS)
@pytest.mark.parametrize('mask', [None, np.ones((N, A), bool)])
def test_the_type_is_that_of_the_coefficients_also_for_float32_points(mask, normalization):
  points, centers, coefficients, _ = make('identity')
  half = jnp.asarray(coefficients, jnp.bfloat16)
  options = {'kernel': 'gaussian', 'sigma': 1.0, 'normalization': normalization, 'mask': mask}
  assert jax.eval_shape(functools.partial(hyperbf, **options), points, centers, half).dtype == jnp.bfloat16


def test_the_definition_has_derivatives_in_forward_mode_also_in_bfloat16():
  arrays = make('full')
  along = [np.random.default_rng(1).normal(size=z.shape) for z in arrays]

  def slope(dtype):
    def out(points, centers, coefficients, weights):
      options = {'kernel': 'laplacian', 'sigma': 1.5, 'metric': 'full', 'weights': weights, 'implementation': 'plain'}
      return hyperbf(points, centers, coefficients, **options)

    return jax.jvp(out, *(tuple(jnp.asarray(z, dtype) for z in part) for part in (arrays, along)))[1]

  assert slope('bfloat16').dtype == jnp.bfloat16
  np.testing.assert_allclose(
    slope('bfloat16').astype('f'), slope('float32'), atol=0.05 * np.abs(slope('float32')).max()
  )


@pytest.mark.parametrize('option,wrong,near', [('kernel', 'gausian', 'gaussian'), ('normalization', 'som', 'sum')])
def test_unknown_names_name_the_nearest(option, wrong, near):
  points, centers, coefficients, _ = make('identity')
  options = {'kernel': 'gaussian', 'sigma': 1.0, 'normalization': 'sum', option: wrong}
  with pytest.raises(UserError, match=f"unknown {option} '{wrong}': did you mean '{near}'"):
    hyperbf(points, centers, coefficients, **options)
