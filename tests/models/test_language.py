"""Tests of the language model with every stage: the tokens that an output depends on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.drawn import random_params

from hbf.errors import UserError
from hbf.models.language import LanguageModel
from hbf.nn.registry import STAGE1, make_stages, stage_options
from hbf.nn.traits import traits_of
from hbf.nn.trunk import Trunk

V, LENGTH, D = 11, 6, 8
CAUSAL = [name for name, stage in STAGE1.items() if traits_of(stage).causal]
OF_ANY_LENGTH = ['softmax', 'hyperbf', 'linear', 'gated_hyperbf']


def make(stage1='softmax', stage2='mlp', depth=1, options=(), **changes):
  name = f'{stage1}+{stage2}'
  first, second = stage_options(name, 16)
  trunk = Trunk(depth, *make_stages(name, 2, first | dict(options), second))
  return LanguageModel(trunk, V, LENGTH, D, **changes)


def make_texts(length=LENGTH, seed=0):
  return jnp.asarray(np.random.default_rng(seed).integers(0, V, size=(2, length)), jnp.int32)


def with_params(model, texts):
  return {'params': random_params(model, texts, train=False)}


def others(texts, at):
  """Return the texts with other tokens where `at` is True."""
  return jnp.where(at, (texts + 3) % V, texts)


@pytest.mark.parametrize('name', CAUSAL)
def test_no_logit_knows_of_a_later_token(name):
  """Logits before a changed token stay bit for bit, also in the second of two blocks."""
  model, texts = make(name, depth=2), make_texts()
  params, apply = with_params(model, texts), jax.jit(lambda p, z: model.apply(p, z, train=False))
  before = np.asarray(apply(params, texts))
  for j in range(LENGTH):
    after = np.asarray(apply(params, others(texts, jnp.arange(LENGTH) == j)))
    np.testing.assert_array_equal(before[:, :j], after[:, :j])
    assert np.all(np.any(before[:, j] != after[:, j], axis=-1))


def test_a_model_that_is_not_causal_sees_what_comes_later():
  model, texts = make(causal=False), make_texts()
  params = with_params(model, texts)
  apply = jax.jit(functools.partial(model.apply, train=False))
  before, after = (np.asarray(apply(params, z)) for z in (texts, others(texts, jnp.arange(LENGTH) == 5)))
  assert np.all(np.any(before[:, :5] != after[:, :5], axis=-1))


@pytest.mark.parametrize('causal', [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize('name', OF_ANY_LENGTH)
def test_what_fills_up_a_text_is_as_if_it_were_not_there(name, causal):
  model, texts = make(name, causal=causal), make_texts()
  params, mask = with_params(model, texts), jnp.array([[True] * 4 + [False] * 2, [True] * 6])
  apply = jax.jit(functools.partial(model.apply, train=False))
  filled = np.asarray(apply(params, texts, mask=mask))
  short, whole = (apply(params, z) for z in (texts[:, :4], texts))
  np.testing.assert_allclose(filled[0, :4], short[0], rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(filled[1], whole[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('positions', ['learned', 'sincos', 'none'])
@pytest.mark.parametrize('tied', [True, False])
def test_parameters_are_those_that_the_options_ask_for(tied, positions):
  model = make(positions=positions, tied=tied)
  shapes = jax.tree.map(np.shape, with_params(model, make_texts())['params'])
  expected = {'embedding': {'embedding': (V, D)}, **({'positions': (LENGTH, D)} if positions == 'learned' else {})}
  expected |= {} if tied else {'head': {'kernel': (D, V)}}
  assert {name: shape for name, shape in shapes.items() if name not in ('block0', 'norm')} == expected


def test_a_tied_head_is_the_vectors_of_the_tokens():
  model, texts = make(), make_texts()
  params = with_params(model, texts)['params']
  untied = params | {'head': {'kernel': params['embedding']['embedding'].T}}
  results = [m.apply({'params': p}, texts, train=False) for m, p in ((model, params), (make(tied=False), untied))]
  np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(('options', 'positions', 'knows'), [
  ((), 'none', False), ((), 'sincos', True), ((), 'learned', True), ({'relative_positions': 'rotary'}, 'none', True),
  ({'relative_positions': 'gaussian'}, 'none', True),
], ids=str)  # fmt: skip
def test_order_is_known_by_positions_or_places(options, positions, knows):
  """Without positions, and without a causal context, swapping two tokens does not change the logits of the others."""
  model, texts = make(causal=False, positions=positions, options=dict(options)), make_texts()
  params = with_params(model, texts)
  swapped = texts.at[:, 0].set(texts[:, 3]).at[:, 3].set(texts[:, 0])
  apply = jax.jit(functools.partial(model.apply, train=False))
  before, after = (np.asarray(apply(params, z))[:, 4:] for z in (texts, swapped))
  assert np.allclose(before, after, rtol=1e-4, atol=1e-5) != knows


def test_dropout_drops_in_training_only():
  model, texts = make(dropout=0.5), make_texts()
  params = with_params(model, texts)
  plain = make().apply(params, texts, train=False)
  np.testing.assert_array_equal(model.apply(params, texts, train=False), plain)
  drawn = [model.apply(params, texts, train=True, rngs={'dropout': jax.random.key(i)}) for i in range(2)]
  assert not np.allclose(*drawn)


@pytest.mark.parametrize(
  ('changes', 'length', 'message'),
  [
    ({}, 7, 'a text of 7 tokens is longer than the 6 that the model takes'),
    ({'positions': 'sincos2d'}, 6, "unknown positions 'sincos2d': did you mean 'sincos'"),
    ({'stage1': 'pooling'}, 6, 'AveragePooling mixes a token with later tokens'),
  ],
)
def test_what_can_not_be_is_refused(changes, length, message):
  with pytest.raises(UserError, match=message):
    make(**changes).init(jax.random.key(0), make_texts(length), train=False)


def test_one_text_alone_is_refused():
  with pytest.raises(UserError, match=r'tokens have shape \[6\]: expected \[B, N\], such as tokens\[None\]'):
    make().init(jax.random.key(0), make_texts()[0], train=False)


def test_an_empty_text_is_refused():
  with pytest.raises(UserError, match=r'tokens have shape \[2, 0\], \[B, N\]: expected one token or more'):
    make().init(jax.random.key(0), make_texts()[:, :0], train=False)


def test_a_model_that_sees_later_tokens_keeps_no_cache():
  with pytest.raises(UserError, match='the context continues a text and is not causal'):
    make(causal=False).init(jax.random.key(0), make_texts(), train=False, start=jnp.int32(0))


@pytest.mark.parametrize('shape', [(6,), (2, 5), (2, 6, 6)])
def test_a_mask_of_another_shape_than_the_texts_is_refused(shape):
  with pytest.raises(UserError, match=r'mask has shape \[.*\]: expected \[2, 6\], False for padding'):
    make().init(jax.random.key(0), make_texts(), train=False, mask=jnp.ones(shape, bool))


@pytest.mark.parametrize('unknown', [-1, V])
def test_an_unknown_token_has_logits_of_nan(unknown):
  """A negative index would otherwise count from the end of the vocabulary."""
  model, texts = make(), make_texts()
  logits = model.apply(with_params(model, texts), texts.at[0, 1].set(unknown), train=False)
  assert np.isnan(logits[0, 1]).all()


@pytest.mark.parametrize('tied', [True, False])
def test_a_language_model_can_be_called_twice_with_the_same_parameters(tied):
  model, texts = make(tied=tied), jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)
  params = jax.eval_shape(functools.partial(model.init, train=False), jax.random.key(0), texts)

  def twice(params, texts):
    bound = model.bind(params)
    return bound(texts, train=False), bound(texts[::-1], train=False)

  first, second = jax.eval_shape(twice, params, texts)
  assert first.shape == second.shape == (2, LENGTH, V)
