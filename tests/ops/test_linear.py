import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops import reference
from ops.keywords import hyperbf

import hbf.ops.linear_attention
from hbf.errors import UserError
from hbf.ops.linear_attention import (
  MAPS,
  NORMALIZERS,
  RANDOM_MAPS,
  feature_map,
  linear_attention,
  orthogonal_projections,
)

B, H, N, D, M = 2, 2, 11, 4, 6
WIDTH = np.array([0.9, 1.7], np.float32).reshape(H, 1, 1)
EVERY_FORM = list(itertools.product(MAPS, NORMALIZERS, (False, True)))


@pytest.fixture(autouse=True, scope='module')
def chunks_of_4():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(hbf.ops.linear_attention, 'CHUNK', 4)
    yield


def make(seed=0, length=N, scale=1.0):
  """Return random queries, keys and values, each [B, H, length, D]."""
  return (scale * np.random.default_rng(seed).normal(size=(3, B, H, length, D))).astype('f')


def make_projections(count=M, seed=0):
  rng = np.random.default_rng(seed)
  return np.stack([orthogonal_projections(rng, count, D) for _ in range(H)])


def features(z, name, projections=None):
  """Return the features of z, with the σ that all tests use."""
  return feature_map(z, name, projections=projections, sigma=WIDTH)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def attend(q, k, v, name, normalizer, causal, projections=None):
  phi_q, phi_k = (features(z, name, projections) for z in (q, k))
  return linear_attention(phi_q, phi_k, v, normalizer=normalizer, causal=causal)


def phi(x, name, projections):
  """Return the float64 features [m] of one point x = (vector, σ), by the equations of the papers."""
  (x, sigma), omega = x, projections
  if name == 'elu':
    return np.array([z + 1 if z > 0 else np.exp(z) for z in x])
  if name == 'relu':
    return np.maximum(x, 0)
  if name == 'exp':
    return np.exp(x)
  x = x / len(x) ** 0.25 if name == 'softmax' else x / sigma
  squared_norm = x @ x * (0.5 if name == 'softmax' else 1)
  return np.array([np.exp(w @ x - squared_norm) for w in omega]) / np.sqrt(len(omega))


def naive_features(z, name, projections):
  """Return the features [B, H, N, m] of z [B, H, N, D], one vector after another."""
  z = np.asarray(z, np.float64)
  rows = [
    [[phi((x, WIDTH[h, 0, 0]), name, projections[h]) for x in z[b, h]] for h in range(z.shape[1])]
    for b in range(z.shape[0])
  ]
  return np.array(rows)


def naive(q, k, v, name, normalizer, causal, projections):
  """Compute linear attention from all weights φ(q)·φ(k), one query after another."""
  phi_q, phi_k = (naive_features(z, name, projections) for z in (q, k))
  out = np.zeros(np.shape(v))
  for b, h, i in np.ndindex(out.shape[:3]):
    seen = slice(i + 1 if causal else None)
    weights = phi_k[b, h, seen] @ phi_q[b, h, i]
    out[b, h, i] = weights @ np.asarray(v, np.float64)[b, h, seen]
    if normalizer == 'sum' and weights.sum() > 0:
      out[b, h, i] /= weights.sum()
  return out


def comparable(out, name, normalizer):
  """Return outputs to compare. If a row is determined only up to a factor, divide it by its root mean square."""
  if normalizer == 'sum' or name in ('elu', 'relu'):
    return out
  return out / (out**2).mean(-1, keepdims=True) ** 0.5


@pytest.mark.parametrize('name', MAPS)
def test_features_are_those_of_the_papers(name):
  z, projections = make(1)[0], make_projections()
  values, log_scale = features(z, name, projections)
  np.testing.assert_allclose(values * np.exp(log_scale), naive_features(z, name, projections), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
  'name,normalizer,causal,length',
  [
    *((*implementation, N) for implementation in EVERY_FORM),
    *(('elu', 'sum', causal, 1) for causal in (False, True)),
    *((name, 'sum', True, length) for name in ('elu', 'gaussian') for length in (3, 4, 5, 8)),
  ],
)
def test_attention_equals_all_weights_computed_one_by_one(name, normalizer, causal, length):
  """Chunks have 4 tokens. The lengths are shorter than a chunk, whole chunks, and whole chunks with a rest."""
  arrays, projections = make(length=length), make_projections()
  result = np.asarray(attend(*arrays, name, normalizer, causal, projections))
  expected = naive(*arrays, name, normalizer, causal, projections)
  result, expected = (comparable(z, name, normalizer) for z in (result, expected))
  np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
  'name,normalizer,causal',
  [*((name, 'sum', False) for name in MAPS), *itertools.product(('elu', 'gaussian'), NORMALIZERS, (True,))],
)
def test_gradients_are_those_of_the_formula(name, normalizer, causal):
  """The derivative along a random direction equals a finite difference of the formula in float64."""
  implementation, length = (name, normalizer, causal), 6
  arrays, direction = (np.asarray(make(seed, length), np.float64) for seed in (2, 3))
  projections, cotangent = make_projections(), make(4, length)[0].astype(np.float64)

  def value(arrays):
    return jnp.sum(comparable(attend(*arrays, *implementation, projections), name, normalizer) * cotangent)

  def expected(step):
    return np.sum(
      comparable(naive(*(arrays + step * direction), *implementation, projections), name, normalizer) * cotangent
    )

  gradient = jax.jit(jax.grad(value))(arrays.astype('f'))
  difference = (expected(1e-6) - expected(-1e-6)) / 2e-6
  np.testing.assert_allclose(np.vdot(gradient, direction), difference, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize('normalizer', NORMALIZERS)
@pytest.mark.parametrize('name', MAPS)
def test_causal_outputs_dont_know_of_later_tokens(name, normalizer):
  """Earlier outputs stay bit for bit, even if a later key is so large that it would dominate a sum over all keys."""
  q, k, v = make(5)
  implementation = name, normalizer, True, make_projections()
  before = np.asarray(attend(q, k, v, *implementation))
  for place in (0, 3, 4, 10):
    changed = [z.copy() for z in (q, k, v)]
    for z in changed:
      z[:, :, place] = 300
    after = np.asarray(attend(*changed, *implementation))
    np.testing.assert_array_equal(after[:, :, :place], before[:, :, :place])
    assert not np.array_equal(after[:, :, place], before[:, :, place])


@pytest.mark.parametrize('name', MAPS)
def test_one_key_gets_all_the_weight(name):
  """The first token sees only itself. So the first output of causal attention is the first value."""
  q, k, v = make(6)
  q, k = np.abs(q), np.abs(k)  # relu needs a product above 0
  out = attend(q, k, v, name, 'sum', True, make_projections())
  np.testing.assert_allclose(out[:, :, 0], v[:, :, 0], rtol=1e-5)


def test_a_text_without_tokens_has_no_outputs():
  nothing = jnp.zeros((2, 3, 0, 4))
  assert attend(nothing, nothing, nothing, 'elu', 'sum', True).shape == nothing.shape


def test_queries_similar_to_no_key_get_zeros():
  q, k, v = make(7)
  q, k = np.abs(q), -np.abs(k)
  out, gradients = jax.value_and_grad(lambda z: attend(*z, 'relu', 'sum', False).sum())(np.stack([q, k, v]))
  assert out == 0 and np.all(np.isfinite(gradients))


@pytest.mark.parametrize('causal,dtype', [(False, 'float32'), (True, 'bfloat16')])
@pytest.mark.parametrize('name', MAPS)
def test_extreme_inputs_stay_finite(name, causal, dtype):
  arrays, projections = jnp.asarray(make(8, scale=1e2), dtype), make_projections()

  def loss(arrays):
    out = attend(*arrays, name, 'sum', causal, projections)
    return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

  gradients, out = jax.jit(jax.grad(loss, has_aux=True))(arrays)
  assert out.dtype == jnp.dtype(dtype)
  assert np.all(np.isfinite(out)) and np.all(np.isfinite(gradients))


@pytest.mark.parametrize('name,causal', [*((name, True) for name in MAPS), ('elu', False)])
def test_bfloat16_is_off_by_its_rounding_only(name, causal):
  arrays, projections = [jnp.asarray(z, jnp.bfloat16) for z in make(9)], make_projections()
  result = np.asarray(attend(*arrays, name, 'sum', causal, projections), np.float64)
  expected = naive(*arrays, name, 'sum', causal, projections)
  # relu can leave a query a weight or two, of which every rounding shows.
  assert np.sqrt(np.mean((result - expected) ** 2)) < 0.01 * np.sqrt(np.mean(expected**2))


@pytest.mark.parametrize('count', [1, 5, 8, 37])
def test_projections_are_orthogonal_in_blocks(count):
  rows = orthogonal_projections(np.random.default_rng(0), count, 8)
  assert rows.shape == (count, 8) and rows.dtype == np.float32
  for block in np.split(rows, range(8, count, 8)):
    norms = np.linalg.norm(block, axis=1)
    np.testing.assert_allclose(block @ block.T / np.outer(norms, norms), np.eye(len(block)), atol=1e-6)


def test_each_projection_alone_is_normal():
  """The norms have the χ distribution. Each coordinate of each row of a block is N(0, 1)."""
  d, draws = 4, 20000
  rows = orthogonal_projections(np.random.default_rng(0), draws * d, d).reshape(draws, d, d)
  squares = np.sum(rows**2, axis=-1)
  np.testing.assert_allclose([squares.mean(), squares.var()], [d, 2 * d], rtol=0.05)
  np.testing.assert_allclose(rows.mean(axis=0), np.zeros((d, d)), atol=5 / draws**0.5)
  np.testing.assert_allclose((rows**2).mean(axis=0), np.ones((d, d)), atol=5 * (2 / draws) ** 0.5)
  np.testing.assert_allclose((rows**4).mean(axis=0), np.full((d, d), 3), atol=5 * (96 / draws) ** 0.5)


@pytest.mark.parametrize('name', RANDOM_MAPS)
def test_products_of_random_features_are_unbiased(name):
  """The mean over 4,000 independent draws equals the kernel within five standard errors."""
  rng = np.random.default_rng(0)
  x, projections = 0.7 * rng.normal(size=(2, D)), np.stack([orthogonal_projections(rng, M, D) for _ in range(4000)])
  q, k = (feature_map(z[None].astype('f'), name, projections=projections, sigma=1.3) for z in x)
  weights = np.sum(q.values * k.values, axis=-1) * np.exp(q.log_scale + k.log_scale)[..., 0]
  kernel = {'softmax': np.exp(x[0] @ x[1] / D**0.5), 'gaussian': np.exp(-np.sum((x[0] - x[1]) ** 2) / 2 / 1.3**2)}
  assert abs(weights.mean() - kernel[name]) < 5 * weights.std() / len(weights) ** 0.5
  assert 5 * weights.std() / len(weights) ** 0.5 < 0.1 * kernel[name]


def exact(q, k, v, name):
  """Compute the attention that random features approximate."""
  if name == 'gaussian':
    return np.asarray(hyperbf(q, k, v, kernel='gaussian', sigma=WIDTH))
  return reference.softmax(np.einsum('bhnd,bhad->bhna', q, k, dtype=np.float64) / D**0.5) @ v


@pytest.mark.parametrize('name', RANDOM_MAPS)
def test_more_random_features_come_closer_to_the_exact_operator(name):
  """64 times as many features have an eighth of the error, and the last error is small."""
  q, k, v = make(10, scale=0.3)
  expected = exact(q, k, v, name)

  def error(count):
    outs = [attend(q, k, v, name, 'sum', False, make_projections(count, seed)) for seed in range(8)]
    return np.mean([np.linalg.norm(out - expected) for out in outs]) / np.linalg.norm(expected)

  few, many = error(64), error(64 * 64)
  assert 6 < few / many < 11
  assert many < 0.01


def test_bad_inputs_are_named():
  q, k, v = make()
  with pytest.raises(UserError, match="unknown features 'gausian': did you mean 'gaussian'"):
    attend(q, k, v, 'gausian', 'sum', False)
  with pytest.raises(UserError, match="unknown normalizer 'summ': did you mean 'sum'"):
    attend(q, k, v, 'elu', 'summ', False)
  with pytest.raises(UserError, match='causal attention needs a key a query: 5 queries have 11 keys'):
    attend(q[:, :, :5], k, v, 'elu', 'sum', True)
