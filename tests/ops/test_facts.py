"""Tests of the four facts in docs/explanation/attention.md."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops import reference
from ops.keywords import hyperbf, log_responses

from hbf.ops.normalization import normalize

B, H, N, A, D = 2, 3, 5, 7, 8


def make(seed=0, unit_norm=False):
  """Return random queries [B, H, N, D], keys [B, H, A, D] and values [B, H, A, D]."""
  rng = np.random.default_rng(seed)
  q, k, v = (rng.normal(size=(B, H, length, D)).astype('f') for length in (N, A, A))
  if unit_norm:
    q, k = (z / np.linalg.norm(z, axis=-1, keepdims=True) for z in (q, k))
  return q, k, v


def attention(q, k, v, scale):
  """Compute jax.nn's attention for arrays whose axis of heads comes before the axis of tokens."""
  q, k, v = (jnp.swapaxes(z, 1, 2) for z in (q, k, v))
  return jnp.swapaxes(jax.nn.dot_product_attention(q, k, v, scale=scale), 1, 2)


@pytest.mark.parametrize('sigma', [0.4, 2.0])
def test_fact_1_unit_norms_make_it_softmax_attention_of_temperature_sigma_squared(sigma):
  q, k, v = make(unit_norm=True)
  result = hyperbf(q, k, v, kernel='gaussian', sigma=sigma)
  np.testing.assert_allclose(result, attention(q, k, v, 1 / sigma**2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('sigma', [0.9, 2.0])
def test_fact_2_only_the_norm_of_the_key_stays(sigma):
  q, k, v = (z.astype(np.float64) for z in make(1))
  logits = (np.einsum('bhnd,bhad->bhna', q, k) - 0.5 * np.square(k).sum(-1)[..., None, :]) / sigma**2
  result = hyperbf(*make(1), kernel='gaussian', sigma=sigma)
  np.testing.assert_allclose(result, reference.softmax(logits) @ v, rtol=1e-4, atol=1e-5)


def test_fact_2_one_more_coordinate_makes_it_ordinary_attention():
  q, k, v = make(2)
  sigma = 1.4
  longer_q = np.concatenate([q, np.ones_like(q[..., :1])], axis=-1)
  longer_k = np.concatenate([k, -0.5 * np.square(k).sum(-1, keepdims=True)], axis=-1)
  longer_v = np.concatenate([v, np.zeros_like(v[..., :1])], axis=-1)
  fused = attention(longer_q, longer_k, longer_v, 1 / sigma**2)[..., :D]
  np.testing.assert_allclose(hyperbf(q, k, v, kernel='gaussian', sigma=sigma), fused, rtol=1e-4, atol=1e-5)


def test_fact_2_it_is_not_dot_product_attention_unless_the_keys_of_a_head_have_equal_norms():
  q, k, v = make(3)
  sigma = 1.4
  plain = np.asarray(attention(q, k, v, 1 / sigma**2))
  assert np.abs(np.asarray(hyperbf(q, k, v, kernel='gaussian', sigma=sigma)) - plain).max() > 0.1
  equal = k / np.linalg.norm(k, axis=-1, keepdims=True) * np.array([1.0, 2.0, 3.0]).reshape(1, H, 1, 1)
  result = hyperbf(q, equal.astype('f'), v, kernel='gaussian', sigma=sigma)
  np.testing.assert_allclose(result, attention(q, equal, v, 1 / sigma**2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('normalization', reference.NORMALIZATIONS)
@pytest.mark.parametrize('metric', ['diagonal', 'low_rank', 'full'])
def test_fact_3_the_metric_folds_into_points_and_centers(metric, normalization):
  q, k, v = make(4)
  weights = reference.metric_weights(np.random.default_rng(4), metric, D, 3, lead=(H,))
  unit = {'kernel': 'gaussian', 'sigma': 1.2, 'normalization': normalization}
  folded = [z * weights[:, None] if metric == 'diagonal' else z @ weights.swapaxes(-1, -2) for z in (q, k)]
  result = hyperbf(q, k, v, metric=metric, weights=weights, **unit)
  np.testing.assert_allclose(result, hyperbf(*folded, v, **unit), rtol=1e-4, atol=1e-5)


def test_fact_3_the_normalized_gaussian_needs_the_metric_on_the_centers_only():
  q, k, v = make(5)
  sigma = 1.2
  weights = reference.metric_weights(np.random.default_rng(5), 'full', D, 3, lead=(H,))
  result = hyperbf(q, k, v, kernel='gaussian', sigma=sigma, metric='full', weights=weights)
  x, t, m = q.astype(np.float64), k.astype(np.float64), np.swapaxes(weights, -1, -2) @ weights
  mt = np.einsum('hde,bhae->bhad', m, t)
  logits = (np.einsum('bhnd,bhad->bhna', x, mt) - 0.5 * (t * mt).sum(-1)[..., None, :]) / sigma**2
  np.testing.assert_allclose(result, reference.softmax(logits) @ v, rtol=1e-4, atol=1e-5)


def tokens_and_centers(d=384):
  """Return tokens [32, d] after a LayerNorm, and centers [48, d] drawn from N(0, 1)."""
  rng = np.random.default_rng(0)
  return reference.layer_norm(rng.normal(size=(32, d))).astype('f'), rng.normal(size=(48, d)).astype('f')


def response(centers, tokens, variance):
  log_k = log_responses(tokens, centers, kernel='gaussian', sigma=jnp.sqrt(variance))
  return normalize(log_k, 'none')


def test_fact_4_squared_distances_are_near_2d():
  tokens, centers = tokens_and_centers()
  r2 = -2 * np.asarray(log_responses(tokens, centers, kernel='gaussian', sigma=1.0))
  np.testing.assert_allclose(r2.mean() / 384, 2, rtol=0.02)
  assert r2.std() / r2.mean() < 0.1


def test_fact_4_sigma_of_order_one_is_dead_without_a_gain():
  tokens, centers = tokens_and_centers()
  assert np.all(np.asarray(response(centers, tokens, 1.0)) == 0)
  gradient = jax.grad(lambda t: response(t, tokens, 1.0).sum())(centers)
  assert np.all(np.asarray(gradient) == 0)


def test_fact_4_sigma_squared_d_is_nearly_constant():
  tokens, centers = tokens_and_centers()
  responses = np.asarray(response(centers, tokens, 384.0))
  np.testing.assert_allclose(responses.mean(), np.exp(-1), rtol=0.03)
  assert responses.std() / responses.mean() < 2 / np.sqrt(384)
