"""Tests that the fast implementations equal the plain one in value and gradients, and need little memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from ops import reference
from ops.keywords import hyperbf, hyperbf_plain

from hbf.ops.basis import RadialBasis
from hbf.ops.fast import sums
from hbf.ops.fast.attention import gaussian_attention
from hbf.ops.fast.blocked import causal_blocks
from hbf.ops.fast.choice import fastest
from hbf.ops.hyperbf import hyperbf_plain as definition
from hbf.training.sharding import make_mesh

N, A, D, V = 37, 11, 6, 5


def make(metric='identity', seed=0, lead=(), centers=A):
  """Return float32 arrays by name: points, centers, coefficients, a σ for each center, log-gain and metric."""
  rng = np.random.default_rng(seed)
  shapes = {'points': (N, D), 'centers': (centers, D), 'coefficients': (centers, V)}
  arrays = {name: jnp.asarray(rng.normal(size=(*lead, *shape)), jnp.float32) for name, shape in shapes.items()}
  arrays['sigma'] = jnp.asarray(rng.uniform(0.8, 2, size=(*lead, 1, centers)), jnp.float32)
  arrays['log_gain'] = jnp.asarray(rng.normal(size=(*lead, 1, 1)), jnp.float32)
  if metric != 'identity':
    weights = jnp.asarray(reference.metric_weights(rng, metric, D, 2, lead))
    # A free M may make a Gaussian of any size, and its rounding too.
    arrays['weights'] = weights @ weights.mT if metric == 'bilinear' else weights
  return arrays


def use_blocks(monkeypatch, pairs):
  """Let responses be computed in blocks of `pairs` pairs of a point and a center, and anew for the gradient."""
  monkeypatch.setattr(sums, '_KEPT_RATIO', 0)
  monkeypatch.setattr(sums, '_PAIRS', pairs)


def value_and_gradients(implementation, arrays, **unit):
  """Return the value and gradients of a scalar that depends on every output differently."""
  return jax.jit(jax.value_and_grad(lambda z: jnp.sum(jnp.sin(implementation(**z, **unit).astype(jnp.float32)))))(
    arrays
  )


def assert_equal(result, expected, tolerance):
  np.testing.assert_allclose(result[0], expected[0], rtol=tolerance, atol=tolerance)
  for name in expected[1]:
    wanted = np.asarray(expected[1][name], np.float64)
    scale = np.abs(wanted).max() + 1e-3
    np.testing.assert_allclose(
      np.asarray(result[1][name], np.float64) / scale, wanted / scale, atol=tolerance, err_msg=name
    )


@pytest.mark.parametrize(('pairs', 'lead'), [(1, ()), (4 * A, ()), (4 * A, (3,)), (N * A, (3,))])
@pytest.mark.parametrize('normalization', ['layer', 'none'])
def test_blocks_of_any_size_equal_the_plain_form(normalization, lead, pairs, monkeypatch):
  """Blocks are single points, numbers of points that don't divide all points, or all points at once."""
  use_blocks(monkeypatch, pairs)
  unit = {'kernel': 'gaussian', 'metric': 'diagonal', 'normalization': normalization}
  arrays = make('diagonal', lead=lead)
  result, expected = (
    value_and_gradients(implementation, arrays, **unit) for implementation in (hyperbf, hyperbf_plain)
  )
  assert_equal(result, expected, 1e-4)


# Sums know only the kernel, distances only the metric, what follows the normalization: each once, and with others.
EACH = [
  ('gaussian', 'bilinear', 'layer'),
  ('gaussian', 'low_rank', 'none'),
  ('laplacian', 'identity', 'sum'),
  ('laplacian', 'full', 'layer'),
  ('rational_quadratic', 'diagonal', 'rms'),
  ('inverse_multiquadric', 'full', 'none'),
]


@pytest.mark.parametrize(('kernel', 'metric', 'normalization'), EACH)
def test_every_kernel_and_metric_equals_the_plain_form_in_blocks(kernel, metric, normalization, monkeypatch):
  use_blocks(monkeypatch, 8 * A)
  unit = {'kernel': kernel, 'metric': metric, 'normalization': normalization}
  result, expected = (
    value_and_gradients(implementation, make(metric, 1), **unit) for implementation in (hyperbf, hyperbf_plain)
  )
  assert_equal(result, expected, 2e-4)


@pytest.mark.parametrize('normalization', reference.NORMALIZATIONS)
@pytest.mark.parametrize(
  ('kernel', 'sigma_per', 'masked'),
  [
    ('gaussian', 1, False),
    pytest.param('gaussian', N, False, marks=pytest.mark.slow),
    pytest.param('gaussian', N, True, marks=pytest.mark.slow),
    ('laplacian', N, True),
  ],
)
def test_causal_sums_are_those_of_the_plain_form_with_a_triangular_mask(
  kernel, sigma_per, masked, normalization, monkeypatch
):
  """Some sums are computed as attention, others in blocks. A mask may leave out some centers."""
  use_blocks(monkeypatch, 4 * N)
  lead = (3,) if masked == (normalization in ('sum', 'layer')) else ()  # each with every other, but not all at once
  arrays = make('diagonal', lead=lead, centers=N)
  arrays['sigma'] = arrays['sigma'][..., :sigma_per]
  unit = {'kernel': kernel, 'metric': 'diagonal', 'normalization': normalization}
  shown = jnp.asarray((np.random.default_rng(5).random((N, N)) < 0.5) | np.eye(N, dtype=bool)) if masked else None
  plain = functools.partial(hyperbf_plain, mask=np.tri(N, dtype=bool) & (True if shown is None else shown))
  result = value_and_gradients(functools.partial(hyperbf, causal=True, mask=shown), arrays, **unit)
  assert_equal(result, value_and_gradients(plain, arrays, **unit), 1e-4)


@pytest.mark.parametrize(('kernel', 'sigma_per'), [('gaussian', 1), ('gaussian', A), ('laplacian', A)])
def test_masked_sums_are_those_of_the_plain_form(kernel, sigma_per):
  """Some of the sums are computed as attention."""
  arrays = make('diagonal', lead=(3,))
  arrays['sigma'] = arrays['sigma'][..., :sigma_per]
  shown = jnp.asarray(np.random.default_rng(5).random((N, A)) < 0.5).at[:, 2].set(True)
  unit = {'kernel': kernel, 'metric': 'diagonal', 'mask': shown}
  assert_equal(
    *(value_and_gradients(implementation, arrays, **unit) for implementation in (hyperbf, hyperbf_plain)), 1e-4
  )


def in_bfloat16(arrays):
  return {n: z.astype(jnp.bfloat16) if n in ('points', 'centers', 'coefficients') else z for n, z in arrays.items()}


def assert_near_in_bfloat16(unit, arrays):
  half = in_bfloat16(arrays)
  rounded = {n: z.astype(jnp.float32) for n, z in half.items()}
  value, gradients = value_and_gradients(hyperbf, half, **unit)
  assert {name: z.dtype for name, z in gradients.items()} == {name: z.dtype for name, z in half.items()}
  expected, wanted = value_and_gradients(hyperbf_plain, rounded, **unit)
  assert_equal((value / N, gradients), (expected / N, wanted), 0.05)


@pytest.mark.parametrize('normalization', reference.NORMALIZATIONS)
def test_blocks_in_bfloat16_stay_near_the_plain_form_in_float32(normalization, monkeypatch):
  use_blocks(monkeypatch, 8 * A)
  assert_near_in_bfloat16({'kernel': 'gaussian', 'normalization': normalization}, make(seed=2))


@pytest.mark.parametrize('kernel', reference.KERNELS)
def test_distances_kept_in_bfloat16_stay_near_the_plain_form_in_float32(kernel):
  assert_near_in_bfloat16(
    {'kernel': kernel, 'metric': 'diagonal', 'normalization': 'layer'}, make('diagonal', seed=2)
  )


def test_a_gradient_in_bfloat16_keeps_no_float32_array_of_the_points():
  """Like an MLP, it keeps arrays of points × units in bfloat16. Only arrays with one number a point are float32."""
  half = in_bfloat16(make('diagonal'))
  unit = functools.partial(hyperbf, kernel='gaussian', metric='diagonal', normalization='layer')
  _, pull = jax.eval_shape(lambda arrays: jax.vjp(lambda z: unit(**z), arrays), half)
  kept = jax.tree.leaves(pull)
  assert max(z.size for z in kept) == N * A
  assert [z for z in kept if z.size >= N * min(A, D, V) and z.dtype == jnp.float32] == []


@pytest.mark.parametrize(('kernel', 'metric', 'normalization'), EACH)
def test_distances_kept_for_the_gradient_equal_the_plain_form(kernel, metric, normalization):
  unit = {'kernel': kernel, 'metric': metric, 'normalization': normalization}
  result, expected = (
    value_and_gradients(implementation, make(metric, 5), **unit) for implementation in (hyperbf, hyperbf_plain)
  )
  assert_equal(result, expected, 2e-4)


@pytest.mark.parametrize('normalization', ['layer', 'none'])
def test_a_free_metric_that_is_no_distance_spoils_no_padding(normalization, monkeypatch):
  """Responses of metric bilinear may be huge. Those of padding points, which are 0, must not become NaN."""
  use_blocks(monkeypatch, 8 * A)
  arrays = make('bilinear', seed=3) | {'weights': -40 * jnp.eye(D)}
  arrays |= {name: 3 + 0.1 * arrays[name] for name in ('points', 'centers')}
  unit = {'kernel': 'gaussian', 'normalization': normalization, 'metric': 'bilinear'}
  value, gradient = value_and_gradients(hyperbf, arrays, **unit)
  assert jnp.isfinite(value)
  assert all(jnp.isfinite(z).all() for z in gradient.values())


def test_parts_without_leading_axes_are_shared():
  """Three heads of points share the centers and coefficients, so the gradients of these are sums over the heads."""
  arrays = make(seed=3, lead=(3,))
  arrays |= {name: z for name, z in make(seed=3).items() if name != 'points'}
  unit = {'kernel': 'laplacian', 'normalization': 'layer'}
  assert_equal(
    *(value_and_gradients(implementation, arrays, **unit) for implementation in (hyperbf, hyperbf_plain)), 1e-4
  )


def temporary_bytes(implementation, points, centers):
  d = 16
  shapes = [jax.ShapeDtypeStruct((n, d), jnp.float32) for n in (points, centers, centers)]
  gradient = jax.grad(
    lambda *z: implementation(*z, kernel='gaussian', sigma=2.0, normalization='layer').sum(), (0, 1, 2)
  )
  return jax.jit(gradient).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def test_memory_of_4096_points_and_8192_centers_is_a_quarter_of_the_plain_form():
  """The memory is that of the compiled program, forward and backward. It is not run."""
  assert temporary_bytes(hyperbf, 4096, 8192) <= 0.25 * temporary_bytes(hyperbf_plain, 4096, 8192)


def test_memory_does_not_grow_with_the_responses():
  pairs = 4 * (8 * 4096) * 2048  # bytes of all responses
  assert temporary_bytes(hyperbf, 8 * 4096, 2048) < 0.25 * pairs


def test_points_on_several_devices_stay_there(monkeypatch):
  """Points are sharded over eight devices. No device needs points or responses of another one."""
  use_blocks(monkeypatch, 64 * A)
  mesh = make_mesh(jax.devices())
  rows, everywhere = (NamedSharding(mesh, PartitionSpec(axis)) for axis in ('data', None))
  arrays = make()
  arrays['points'] = jax.random.normal(jax.random.key(0), (1024, D))

  def implementation(z):
    return hyperbf(**z, kernel='gaussian', normalization='layer')

  placed = {name: jax.device_put(z, rows if name == 'points' else everywhere) for name, z in arrays.items()}
  compiled = jax.jit(implementation, out_shardings=rows).lower(placed).compile()
  for moved in ('all-gather', 'all-to-all', 'collective-permute', 'all-reduce'):
    assert moved not in compiled.as_text()
  np.testing.assert_allclose(compiled(placed), jax.jit(implementation)(arrays), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  ('metric', 'normalization', 'lead'),
  [*((metric, 'sum', (3,)) for metric in reference.METRICS), ('diagonal', 'layer', ()), ('bilinear', 'none', (3,))],
)
def test_null_coordinates_are_distances_that_the_metric_leaves_alone(metric, normalization, lead, monkeypatch):
  """x' = (a, −‖a‖²/2, −1) and t' = (b, 1, ‖b‖²/2) have the dot product −‖a − b‖²/2, whatever the metric is."""
  use_blocks(monkeypatch, 4 * A)
  arrays, rng = make(metric, lead=lead), np.random.default_rng(1)
  a, b = (jnp.asarray(rng.normal(size=(*lead, count, 2)), jnp.float32) for count in (N, A))
  half = [0.5 * jnp.sum(z * z, axis=-1, keepdims=True) for z in (a, b)]
  beside = {
    'points': jnp.concatenate([a, -half[0], -jnp.ones_like(half[0])], axis=-1),
    'centers': jnp.concatenate([b, jnp.ones_like(half[1]), half[1]], axis=-1),
  }
  dot_only_dims = arrays | {name: jnp.concatenate([arrays[name], z], axis=-1) for name, z in beside.items()}
  whole = arrays | {name: jnp.concatenate([arrays[name], z], axis=-1) for name, z in (('points', a), ('centers', b))}
  sigma = arrays['sigma'][..., :1] if normalization == 'sum' else arrays['sigma']  # as attention, if it can be

  def with_a_metric_of_1(weights=None, **z):
    count = 0 if metric == 'identity' else weights.ndim - len(lead)
    if count:
      grown = jnp.pad(weights, [(0, 0)] * len(lead) + [(0, 2)] * count)
      ones = jnp.ones(2) if count == 1 else jnp.eye(2)
      weights = grown.at[(..., *[slice(-2, None)] * count)].set(ones)
    return hyperbf_plain(**z, weights=weights, metric=metric, kernel='gaussian', normalization=normalization)

  unit = {'metric': metric, 'kernel': 'gaussian', 'normalization': normalization, 'dot_only_dims': 4}
  expected = value_and_gradients(with_a_metric_of_1, whole | {'sigma': sigma})
  for implementation in (hyperbf, hyperbf_plain):
    value, gradients = value_and_gradients(implementation, dot_only_dims | {'sigma': sigma}, **unit)
    shared = {name: gradients[name] for name in arrays if name not in beside}
    shared |= {name: gradients[name][..., :D] for name in beside}
    wanted = {name: z[..., :D] if name in beside else z for name, z in expected[1].items()}
    assert_equal((value, shared), (expected[0], wanted), 2e-4)


def test_the_plain_form_has_forward_mode():
  """The other implementations have only a hand-written reverse mode. Both modes give the same Jacobian."""
  arrays = make()
  points, how = arrays.pop('points'), {'kernel': 'gaussian', 'normalization': 'layer'}
  implementation, plain = (
    functools.partial(hyperbf, **arrays, **how, implementation=implementation) for implementation in ('xla', 'plain')
  )
  direction = jnp.ones_like(points)
  _, tangent = jax.jit(lambda points: jax.jvp(plain, (points,), (direction,)))(points)
  (pulled,) = jax.jit(lambda points: jax.vjp(implementation, points)[1](tangent))(points)
  np.testing.assert_allclose(jnp.vdot(pulled, direction), jnp.vdot(tangent, tangent), rtol=1e-4)


@pytest.mark.parametrize(('causal', 'expected'), [(False, definition), (True, causal_blocks)])
def test_plain_is_the_definition_also_of_the_gaussian_that_is_attention(causal, expected):
  arrays, basis = make(), RadialBasis('gaussian', 1.0)
  arrays = [arrays[name] for name in ('points', 'centers', 'coefficients')]
  fast, plain = (fastest(definition, *arrays, basis, None, causal, name) for name in ('xla', 'plain'))
  assert fast is gaussian_attention
  assert getattr(plain, 'func', plain) is expected


def test_the_peak_of_the_responses_has_no_gradient():
  """If a compiler computes responses twice, none may equal the peak. A gradient of the peak would then be NaN."""
  s, c = jnp.asarray(np.random.default_rng(0).normal(size=(3, 7)), jnp.float32), jnp.ones((7, 2))
  of_peak = jax.grad(lambda s: sums._block_sums('gaussian', s, c).log_peak.sum())(s)
  np.testing.assert_array_equal(of_peak, 0)
