"""Tests of attention: the shapes that cuDNN takes, the choice of cuDNN, and the normalized Gaussian as attention."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops import reference
from ops.keywords import hyperbf, hyperbf_plain

from hbf.config.recipes import make_config
from hbf.config.resolve import resolve
from hbf.models.build import abstract_params, build_model
from hbf.nn.baselines.softmax import SoftmaxAttention
from hbf.nn.context import Context
from hbf.nn.hyperbf import HyperBFAttention
from hbf.ops.fast.attention import attention, cudnn_applies, fused_attention, padded_attention, short_parts


def make(lengths, dims, dtype='float32', seed=4):
  """Return a random array [2, 3, length, dim] for each pair of a length and a dim."""
  rng = np.random.default_rng(seed)
  return [jnp.asarray(rng.normal(size=(2, 3, *z)), dtype) for z in zip(lengths, dims, strict=True)]


def value_and_gradients(implementation, *arrays):
  """Return the outputs, and the gradients of a scalar that depends on every output differently.

  The scalar itself is not compared. If it happens to be near 0, it has fewer correct digits than its terms.
  """

  def total(arrays):
    out = implementation(*arrays).astype(jnp.float32)
    return jnp.sum(jnp.sin(out)), out

  gradients, out = jax.jit(jax.grad(total, has_aux=True))(arrays)
  return [np.asarray(z, np.float64) for z in (out, *gradients)]


def assert_near(result, expected, tolerance):
  for z, wanted in zip(result, expected, strict=True):
    np.testing.assert_allclose(z, wanted, atol=tolerance * (np.abs(wanted).max() + 0.1))


@pytest.mark.parametrize('lengths', [(9, 7, 7), (8, 7, 7), (9, 8, 8), (8, 8, 8)])
@pytest.mark.parametrize(
  ('dims', 'scale', 'is_causal'),
  [((6, 6, 6), None, False), ((8, 8, 5), None, False), ((8, 8, 8), None, False)]
  + [((6, 6, 6), 0.7, False), ((6, 6, 6), None, True)],
)
def test_what_cudnn_is_given_is_the_same_attention(lengths, dims, scale, is_causal):
  """Values and gradients agree for odd numbers of tokens and for heads of any size."""

  def plain(q, k, v):
    logits = jnp.einsum('bhnd,bhad->bhna', q, k) * (scale or dims[0] ** -0.5)
    logits = jnp.where(np.tri(*logits.shape[-2:]) > 0, logits, -jnp.inf) if is_causal else logits
    return jnp.einsum('bhna,bhav->bhnv', jax.nn.softmax(logits), v)

  def padded(q, k, v):
    return fused_attention(q, k, v, scale=scale or dims[0] ** -0.5, causal=is_causal, implementation='xla')

  arrays = make(lengths, dims)
  assert_near(value_and_gradients(padded, *arrays), value_and_gradients(plain, *arrays), 1e-5)


def test_what_cudnn_is_given_has_even_lengths_and_heads_of_a_multiple_of_8(monkeypatch):
  """With a class token there are 65 tokens, which cuDNN refuses in training."""
  seen = []

  def record(q, k, v, **_):
    seen.extend(z.shape for z in (q, k, v))
    return q

  monkeypatch.setattr(jax.nn, 'dot_product_attention', record)
  q, k, v = (jnp.ones((2, 1, n, d)) for n, d in ((65, 19), (67, 19), (67, 12)))
  assert padded_attention(q, k, v, 1.0).shape == (2, 1, 65, 12)
  assert seen == [(2, 66, 1, 24), (2, 68, 1, 24), (2, 68, 1, 24)]


@pytest.mark.parametrize(('dtype', 'tolerance'), [('float32', 1e-5), ('bfloat16', 0.02)])
@pytest.mark.parametrize('is_causal', [False, True])
def test_augmented_keys_make_plain_attention_the_normalized_gaussian(dtype, tolerance, is_causal):
  """Here XLA's attention gets the arrays that cuDNN gets on a GPU. Values and gradients agree."""
  scale = 0.4
  mask = np.tri(9, 7) > 0 if is_causal else None

  def augmented(x, t, c):
    return fused_attention(x, t, c, scale=jnp.asarray(scale), centers=t, causal=is_causal, implementation='xla')

  def plain(x, t, c):
    return hyperbf_plain(x, t, c, kernel='gaussian', sigma=scale**-0.5, mask=mask)

  arrays = make((9, 7, 7), (8, 8, 8), dtype)
  expected = value_and_gradients(plain, *(z.astype(jnp.float32) for z in arrays))
  assert_near(value_and_gradients(augmented, *arrays), expected, tolerance)


def test_a_bias_in_three_bfloat16_coordinates_is_as_good_as_float32():
  """Queries are 0 and biases are large. Biases in a single bfloat16 coordinate would cause an error of 0.1."""
  x, coefficients = jnp.zeros((1, 1, 1, 8), jnp.bfloat16), jnp.asarray(np.eye(2, 8), jnp.bfloat16).reshape(1, 1, 2, 8)
  keys = jnp.zeros((1, 1, 2, 8), jnp.bfloat16).at[..., 0].set(jnp.asarray([7.75, 7.78125], jnp.bfloat16))
  bias = -0.5 * np.square([7.75, 7.78125])
  out = fused_attention(x, keys, coefficients, scale=jnp.ones(()), centers=keys, implementation='xla')
  np.testing.assert_allclose(out[0, 0, 0, :2], np.exp(bias) / np.exp(bias).sum(), atol=0.003)


def as_on_a_gpu(x, t, c, scale):
  return fused_attention(x, t, c, scale=jnp.asarray(scale, jnp.float32), centers=t, implementation='xla')


def as_by_xla(x, t, c, scale):
  return hyperbf(x, t, c, kernel='gaussian', sigma=scale**-0.5)


@pytest.mark.parametrize('rms', [1, 3, 10])
def test_gradients_of_bfloat16_attention_are_as_good_for_large_keys(rms):
  """For keys of size 10, gradients would be wrong by 5% if keys, but not their norms, were rounded after scaling."""
  x, t, c = make((33, 31, 31), (16, 16, 16))
  arrays = [z.astype(jnp.bfloat16) for z in (rms * x, rms * t, c)]
  implementation = functools.partial(as_by_xla, scale=0.31)  # a product with a power of two would round nothing
  expected = value_and_gradients(implementation, *(z.astype(jnp.float32) for z in arrays))
  for z, wanted in zip(value_and_gradients(implementation, *arrays), expected, strict=True):
    assert np.linalg.norm(z - wanted) < 0.006 * np.linalg.norm(wanted)


@pytest.mark.parametrize('implementation', [as_by_xla, as_on_a_gpu])
@pytest.mark.parametrize('rms', [1, 3, 10])
def test_bfloat16_attention_tells_near_keys_apart(implementation, rms):
  """A query nearly equals two large keys. Rounding the keys after scaling would cause an error of a quarter."""
  rng = np.random.default_rng(0)
  near = rms * rng.normal(size=(1, 1, 1, 64)) + 0.1 * rng.normal(size=(2, 8, 3, 64))
  x, t = (jnp.asarray(z, jnp.bfloat16) for z in (near[:, :, :1], near[:, :, 1:]))
  c = jnp.asarray(np.broadcast_to(np.eye(2), (2, 8, 2, 2)), jnp.bfloat16)
  r2 = np.square(np.asarray(x, np.float64) - np.asarray(t, np.float64)).sum(-1)
  expected = reference.softmax(-r2 * 0.31 / 2)
  np.testing.assert_allclose(np.asarray(implementation(x, t, c, 0.31), np.float64)[:, :, 0], expected, atol=0.01)


def test_softmax_attention_multiplies_keys_and_not_all_logits_by_its_scale():
  """A scaling of the 9×7 logits would be one more pass over them, which makes training a third slower on a CPU."""
  q, k, v = make((9, 7, 7), (8, 8, 8))
  text = str(jax.make_jaxpr(attention)(q, k, v))
  assert 'f32[2,3,7,8] = mul' in text
  assert 'f32[2,3,9,7] = mul' not in text


@pytest.fixture
def cudnn(monkeypatch):
  """Let JAX trace cuDNN's attention as if cuDNN were installed. Return a list of the queries' shapes."""
  seen, attention = [], jax.nn.dot_product_attention

  def traced(q, k, v, *, implementation=None, **options):
    if implementation == 'cudnn':
      seen.append(q.shape)
      if q.shape[-1] > 128:
        raise NotImplementedError('the head dim must be <= 128')
      return jax.lax.digamma(attention(q, k, v, **options))  # by which a program shows that it is here
    return attention(q, k, v, **options)

  monkeypatch.setattr(jax.nn, 'dot_product_attention', traced)
  return seen


@pytest.mark.parametrize(
  ('capability', 'dtype', 'd', 'expected'),
  [
    ('9.0', jnp.bfloat16, 64, True),
    ('8.0', jnp.float16, 19, True),
    (None, jnp.bfloat16, 64, True),  # the program is for a GPU that isn't here
    ('9.0', jnp.float32, 64, False),
    ('7.5', jnp.bfloat16, 64, False),
    ('9.0', jnp.bfloat16, 192, False),
    ('gfx90a', jnp.bfloat16, 64, True),  # AMD's: never asked, as the program for it has no cuDNN
  ],
)
def test_cudnn_applies_by_what_it_takes(capability, dtype, d, expected, cudnn, monkeypatch):
  device = types.SimpleNamespace() if capability is None else types.SimpleNamespace(compute_capability=capability)
  monkeypatch.setattr(jax, 'local_devices', lambda: [device])
  assert cudnn_applies(jnp.dtype(dtype), d) == expected


def test_without_cudnns_library_xla_computes_attention(monkeypatch):
  def missing(*_, implementation=None, **__):
    raise RuntimeError('cuDNN is not detected.')

  monkeypatch.setattr(jax.nn, 'dot_product_attention', missing)
  assert not cudnn_applies(jnp.dtype(jnp.bfloat16), 64)


@pytest.mark.parametrize('model', ['hyperbf', 'vit', 'amlp'])
def test_one_rule_chooses_for_every_attention(model, cudnn):
  """The bfloat16 program for an NVIDIA GPU has cuDNN's attention. The programs for other devices have XLA's."""
  config = resolve(make_config(f'model={model},recipe=small', {'name': 'cifar10'})).model
  with config.unlocked():
    config.dtype = 'bfloat16'
  network = build_model(config, 10)
  params = abstract_params(network, (32, 32, 3))
  cudnn.clear()
  images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
  forward = jax.jit(lambda params, images: network.apply({'params': params}, images, train=False))
  traced = forward.trace(params, images)
  assert [shape for shape in cudnn if shape[0] == 2], 'nobody asked'
  for platform in ('cuda', 'cpu', 'tpu'):
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ('digamma' in text) == (platform == 'cuda'), platform


def test_causal_attention_goes_to_cudnn_too(cudnn):
  """cuDNN gets the argument is_causal. A mask would be an array of all pairs of tokens."""
  asked, traced = [], jax.nn.dot_product_attention

  def recorded(*qkv, implementation=None, is_causal=False, **options):
    asked.append((implementation, is_causal, options.get('mask')))
    return traced(*qkv, implementation=implementation, is_causal=is_causal, **options)

  tokens = jax.ShapeDtypeStruct((2, 9, 16), jnp.bfloat16)
  for module in (SoftmaxAttention(2, dtype=jnp.bfloat16), HyperBFAttention(2, dtype=jnp.bfloat16)):
    params = jax.eval_shape(module.init, jax.random.key(0), tokens)
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(jax.nn, 'dot_product_attention', recorded)
      jax.eval_shape(functools.partial(module.apply, context=Context(causal=True)), params, tokens)
    assert ('cudnn', True, None) in asked
    asked.clear()


def test_arrays_of_several_types_do_not_go_to_cudnn(cudnn):
  head, longer = (jax.ShapeDtypeStruct((2, 4, 65, 16), dtype) for dtype in (jnp.bfloat16, jnp.float32))
  for arrays in ((head, head, longer), (head, longer, head)):
    assert jax.eval_shape(attention, *arrays).dtype == arrays[2].dtype
  assert not cudnn


def test_attention_takes_the_way_of_its_platform(cudnn):
  """The implementation is chosen when the program is lowered. The traced program has both."""
  head = jax.ShapeDtypeStruct((2, 4, 65, 16), jnp.bfloat16)
  equations = jax.make_jaxpr(attention)(head, head, head).eqns
  (choice,) = [e for e in equations if e.primitive.name == 'cond']
  assert choice.params['branches_platforms'] == (('cuda',), None)


@pytest.mark.parametrize(('platform', 'queries', 'copies'), [('cpu', 9, 2), ('cpu', 1, 0), ('tpu', 9, 0)])
def test_float32_attention_copies_keys_and_values_on_cpus_except_for_one_query(platform, queries, copies):
  """For one query, as in the generation of text, copies of all keys and values would cost more than the products."""
  query, head = (jax.ShapeDtypeStruct((2, 4, n, 16), jnp.float32) for n in (queries, 9))
  text = jax.jit(attention).trace(query, head, head).lower(lowering_platforms=(platform,)).as_text()
  assert text.count('optimization_barrier') == copies


@pytest.mark.parametrize('centers', [False, True])
def test_no_gradient_on_a_cpu_is_a_product_of_a_transposed_array(centers):
  """A product that sums over the first axis of its first matrix takes about twice as long as other products."""
  head = jax.ShapeDtypeStruct((2, 4, 24, 8), jnp.float32)

  def total(q, k, v, t):
    return attention(q, k, v, 0.3, t if centers else None).sum()

  text = jax.jit(jax.grad(total, (0, 1, 2, 3))).lower(*[head] * 4).compile().as_text()
  assert re.findall(r'lhs_contracting_dims={(\d)}', text).count('3') == 6
  assert 'lhs_contracting_dims={2}' not in text


@pytest.mark.parametrize('platform', ['cpu', 'default'])
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('masked', [False, True])
@pytest.mark.parametrize('centered', [False, True])
def test_each_platforms_form_is_attention(platform, causal, masked, centered, monkeypatch):
  """Values and gradients are those of the definition in float64, with a mask and with centers too."""
  monkeypatch.setattr(jax.lax, 'platform_dependent', lambda *arrays, **forms: forms[platform](*arrays))
  q, k, v, t = make((9, 9, 9, 9), (6, 6, 4, 6))
  scale = jnp.asarray([0.3, 1.0, 2.0]).reshape(3, 1, 1)
  mask = jnp.asarray(np.random.default_rng(1).random((2, 1, 9, 9)) < 0.7) | jnp.eye(9, dtype=bool) if masked else None

  def form(q, k, v, scale, t):
    return attention(q, k, v, scale, t if centered else None, mask, causal)

  def definition(q, k, v, scale, t):
    logits = scale * (q @ k.mT - (0.5 * jnp.sum(t * k, axis=-1)[..., None, :] if centered else 0))
    seen = np.tri(9, dtype=bool) if causal else np.ones((9, 9), bool)
    logits = jnp.where(seen if mask is None else seen & mask, logits, -jnp.inf)
    return jax.nn.softmax(logits, axis=-1) @ v

  arrays = (q, k, v, scale, t)
  with jax.enable_x64(True):
    expected = value_and_gradients(definition, *(jnp.asarray(z, jnp.float64) for z in arrays))
  assert_near(value_and_gradients(form, *arrays), expected, 1e-5)


def test_values_may_have_fewer_dimensions_than_keys():
  q, k, v = make((9, 7, 7), (8, 8, 5))
  expected = jax.nn.softmax(q @ k.mT * 8**-0.5) @ v
  np.testing.assert_allclose(attention(q, k, v), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(('dtype', 'count', 'bits'), [('bfloat16', 2, 16), ('bfloat16', 3, 23), ('float16', 2, 21)])
def test_short_parts_add_up_to_the_number(dtype, count, bits):
  numbers = np.random.default_rng(0).normal(size=1000).astype('f') + 100
  parts = jax.jit(short_parts, static_argnums=(1, 2))(numbers, jnp.dtype(dtype), count)
  assert [z.dtype for z in parts] == [jnp.dtype(dtype)] * count
  total = np.sum([np.asarray(z, np.float64) for z in parts], axis=0)
  assert np.abs(total / numbers - 1).max() <= 2.0**-bits


def test_no_short_part_is_converted_back():
  """XLA may leave out a conversion to bfloat16 and back. Then the rest z − z would be 0, and parts would be lost."""
  equations = jax.make_jaxpr(lambda z: short_parts(z, jnp.dtype(jnp.bfloat16), 3))(jnp.ones(4)).jaxpr.eqns
  converted = [e.invars[0].aval.dtype for e in equations if e.primitive.name == 'convert_element_type']
  assert converted == [jnp.float32] * 3
