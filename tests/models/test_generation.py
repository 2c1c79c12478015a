"""Tests that texts written token by token equal those of a network that reads the whole text for every token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.test_language import CAUSAL, LENGTH, V, make, make_texts, with_params
from sampled import sampled

from hbf.errors import UserError
from hbf.models.generation import Sampling, generate, generate_on
from hbf.nn.context import Context, Continued
from hbf.nn.registry import make_stages, stage_options
from hbf.ops.linear_attention import MAPS

STAGES = [(name, {}) for name in CAUSAL]
STAGES += [('linear', {'features': name, 'normalizer': 'none'}) for name in MAPS]
STAGES += [
  ('hyperbf', {'kernel': 'laplacian', 'metric': 'diagonal'}),
  ('hyperbf', {'memory': 3, 'qk_norm': True}),
  ('hyperbf', {'relative_positions': 'rotary'}),
  ('hyperbf', {'relative_positions': 'gaussian', 'memory': 2}),
  ('hyperbf', {'relative_positions': 'adaptive'}),
  ('softmax', {'relative_positions': 'rotary', 'qk_norm': True}),
  ('softmax', {'relative_positions': 'gaussian'}),
  ('gated_hyperbf', {'memory': 2}),
  ('gmlp', {'attention': 4}),
  ('gmlp', {'gate': 'linear'}),
  ('token_mlp', {'hidden': 5}),
]
GREEDY = Sampling(temperature=0.0)


def in_parts(model, params, texts, lengths):
  """Return the logits of texts that are read in parts of these lengths."""

  @jax.jit
  def read(cache, part, start):
    return model.apply({**params, **cache}, part, train=False, start=start, mutable=['cache'])

  cache, found, start = {}, [], 0
  for length in lengths:
    logits, cache = read(cache, texts[:, start : start + length], jnp.int32(start))
    found.append(logits)
    start += length
  return jnp.concatenate(found, axis=1)


@pytest.mark.parametrize(('name', 'options'), sampled(STAGES), ids=str)
def test_a_text_in_parts_has_the_logits_of_the_whole(name, options):
  model, texts = make(name, depth=1, options=options), make_texts()
  params = with_params(model, texts)
  whole = jax.jit(functools.partial(model.apply, train=False))(params, texts)
  found = in_parts(model, params, texts, (1,) * 6 if options else (2, 2, 1, 1))  # each length has its own program
  np.testing.assert_allclose(found, whole, rtol=0, atol=1e-5 * np.abs(whole).max())


@pytest.mark.parametrize('length', [127, pytest.param(300, marks=pytest.mark.slow)])
def test_the_state_of_linear_attention_goes_on_from_any_number_of_tokens(length):
  """The sums are computed in chunks of 128 tokens, and the last chunk is padded. The keys are long."""
  stage = make_stages('linear+none', 2, {**stage_options('linear+none', 16)[0], 'features': 'gaussian'}, {})[0]()
  tokens = jnp.asarray(3 * np.random.default_rng(0).normal(size=(1, length + 2, 8)), jnp.float32)
  params = jax.jit(stage.init)(jax.random.key(0), tokens)
  whole = jax.jit(lambda params: stage.apply(params, tokens, Context(causal=True)))(params)

  @jax.jit
  def read(cache, part, start):
    continued = Context(causal=True, continued=Continued(start, length + 2))
    return stage.apply({**params, **cache}, part, continued, mutable=['cache'])

  cache, found = {}, []
  for part in (slice(0, length), slice(length, length + 2)):
    out, cache = read(cache, tokens[:, part], jnp.int32(part.start))
    found.append(out)
  np.testing.assert_allclose(jnp.concatenate(found, axis=1), whole, rtol=1e-3, atol=1e-4)


def test_what_finds_no_room_has_no_logits():
  """Its logits are NaN, and not the logits of tokens that it would have overwritten."""
  model, texts = make(), make_texts()
  params = with_params(model, texts)
  assert np.all(np.isnan(in_parts(model, params, jnp.tile(texts, 2), (LENGTH, 1))[:, -1]))
  assert np.all(np.isfinite(in_parts(model, params, texts, (LENGTH - 1, 1))))


def test_a_stage_that_remembers_nothing_is_refused():
  model, texts = make('pooling', causal=False), make_texts(4)
  model = model.clone(length=4)
  # Pooling refuses texts without a cache too. It has no parameters, and neither has identity.
  params = with_params(make('identity', causal=False).clone(length=4), texts)
  with pytest.raises(UserError, match='AveragePooling keeps no cache of earlier tokens'):
    model.apply(params, texts, train=False, start=jnp.int32(0), mutable=['cache'])


def by_whole_texts(model, params):
  """Return a function to the likeliest tokens. The network reads the whole window anew for each token."""
  apply = jax.jit(lambda texts: model.apply(params, texts, train=False)[0])

  def write(prompt, count):
    text = np.zeros((1, model.length), np.int32)
    text[0, : len(prompt)] = prompt
    for i in range(len(prompt), len(prompt) + count):
      text[0, i] = np.argmax(apply(text)[i - 1])
    return text[0, len(prompt) : len(prompt) + count].tolist()

  return write


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 0]]


@pytest.mark.parametrize(
  'name', ['hyperbf', *(pytest.param(n, marks=pytest.mark.slow) for n in CAUSAL if n != 'hyperbf')]
)
def test_the_likeliest_text_is_that_of_whole_texts(name):
  """The prompts in the batch have different lengths."""
  model = make(name).clone(length=12)
  params = with_params(model, jnp.zeros((1, 12), jnp.int32))
  found = generate(model, params, PROMPTS, 8, GREEDY)
  write = by_whole_texts(model, params)
  assert [text.tolist() for text in found] == [write(prompt, 8) for prompt in PROMPTS]


def test_what_is_drawn_for_a_prompt_does_not_depend_on_the_others():
  """The other prompts' tokens, lengths and number have no effect."""
  model = make('linear').clone(length=12)
  params = with_params(model, make_texts())
  together, other, again = (
    generate(model, params, prompts, 8, seed=seed)
    for prompts, seed in ((PROMPTS, 3), ([PROMPTS[0], [7, 8], [1, 1, 1, 1]], 3), (PROMPTS, 4))
  )
  np.testing.assert_array_equal(together[0], other[0])
  np.testing.assert_array_equal(together[0], generate(model, params, PROMPTS[:1], 8, seed=3)[0])
  assert any(not np.array_equal(a, b) for a, b in zip(together, again, strict=True))


@pytest.mark.slow
def test_a_text_that_outgrows_the_model_does_not_depend_on_the_others_either():
  """The moment at which other texts are full, and the number of tokens to write, have no effect."""
  model = make().clone(length=12)
  params = with_params(model, make_texts())
  long, short, alone, fewer = (
    generate_on(model, params, prompts, count, seed=3)[0].tolist()
    for prompts, count in (
      ([[1, 2, 3], [5] * 11], 30),
      ([[1, 2, 3], [4], [6, 7]], 30),
      ([[1, 2, 3]], 30),
      ([[1, 2, 3], [5] * 11], 17),
    )
  )
  assert len(alone) == 30 and long == short == alone
  assert fewer == alone[:17]


def test_a_text_that_outgrows_the_model_goes_on_from_its_last_half():
  model = make('gated_hyperbf').clone(length=12)
  params = with_params(model, make_texts())
  found = generate_on(model, params, PROMPTS, 20, GREEDY)
  write = by_whole_texts(model, params)
  for text, prompt in zip(found, PROMPTS, strict=True):
    expected = list(prompt)
    while len(expected) < len(prompt) + 20:
      read = expected[-6:] if len(expected) >= 12 else expected
      expected += write(read, 12 - len(read))
    assert text.tolist() == expected[len(prompt) :][:20]
  stop = int(found[1][8])
  for text, ended in zip(found, generate_on(model, params, PROMPTS, 20, GREEDY, stop=stop), strict=True):
    whole = text.tolist()
    assert ended.tolist() == (whole[: whole.index(stop)] if stop in whole else whole)


def test_a_text_ends_before_the_token_that_stops_it():
  model = make().clone(length=12)
  params = with_params(model, make_texts())
  whole = generate(model, params, PROMPTS, 8)
  stop = int(whole[0][3])
  for text, ended in zip(whole, generate(model, params, PROMPTS, 8, stop=stop), strict=True):
    expected = text.tolist()
    assert ended.tolist() == (expected[: expected.index(stop)] if stop in expected else expected)


@pytest.mark.parametrize('changes', [{'scan_layers': True}, {'remat': True}], ids=str)
def test_how_blocks_are_computed_in_training_does_not_matter(changes):
  model = make(depth=2)
  params = with_params(model, make_texts())
  other = model.clone(trunk=model.trunk.clone(**changes))
  np.testing.assert_array_equal(*(generate(m, params, [[1, 2]], 4, GREEDY)[0] for m in (model, other)))


LOGITS = np.array([2.0, -1.0, 1.5, 0.0, 1.0], np.float32)


@pytest.mark.parametrize(
  ('sampling', 'drawn'),
  [
    (Sampling(), [0, 1, 2, 3, 4]),
    (Sampling(temperature=0.5), [0, 1, 2, 3, 4]),
    (Sampling(top_k=3), [0, 2, 4]),
    (Sampling(top_k=9), [0, 1, 2, 3, 4]),
    (Sampling(top_p=0.6), [0, 2]),  # 0.45 and 0.27
    (Sampling(top_p=0.44), [0]),
    (Sampling(temperature=2.0, top_k=4, top_p=0.8), [0, 2, 4]),  # of four 0.37, 0.29, 0.22
    (Sampling(temperature=0.0), [0]),
  ],
)
def test_tokens_are_drawn_as_often_as_they_are_likely(sampling, drawn):
  """Only the allowed tokens are drawn."""
  count = 20_000
  tokens = jax.vmap(sampling.draw, (0, None))(jax.random.split(jax.random.key(0), count), jnp.asarray(LOGITS))
  weights = np.exp(LOGITS.astype(np.float64) / (sampling.temperature or 1.0)) * np.isin(np.arange(5), drawn)
  expected = weights / weights.sum()
  found = np.bincount(tokens, minlength=5) / count
  assert np.all(np.abs(found - expected) <= 4 * np.sqrt(expected * (1 - expected) / count))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'temperature': -1.0}, 'temperature is -1.0: expected a number of 0 or more'),
    ({'temperature': float('nan')}, 'temperature is nan: expected a number of 0 or more'),
    ({'temperature': 'a'}, "temperature is 'a': expected a number"),
    ({'top_k': -1}, 'top_k is -1: expected a whole number of 0 or more tokens'),
    ({'top_k': 1.0}, 'top_k is 1.0: expected a whole number'),
    ({'top_p': 0.0}, 'top_p is 0.0: expected a probability'),
    ({'top_p': 1.1}, 'top_p is 1.1: expected a probability'),
  ],
)
def test_sampling_that_can_not_be_is_refused(changes, message):
  with pytest.raises(UserError, match=message):
    dataclasses.replace(Sampling(), **changes)


@pytest.mark.parametrize(
  ('prompts', 'count', 'message'),
  [
    ([[1], []], 2, 'prompt 1 is empty'),
    ([[1, V]], 2, 'prompt 0 has tokens from 1 to 11: 0 to 10 are known'),
    ([[-1]], 2, 'prompt 0 has tokens from -1'),
    ([[1], [1, 2, 3]], 4, 'prompt 1 has 3 tokens, and 4 more are asked for: the model has room for 6'),
    ([[1]], 0, 'nothing to write: 1 prompts, 0 tokens each'),
    ([], 2, 'nothing to write: 0 prompts'),
  ],
)
def test_prompts_that_can_not_be_gone_on_with_are_refused(prompts, count, message):
  with pytest.raises(UserError, match=message):
    generate(make(), {}, prompts, count)


@pytest.mark.parametrize('count', [0, -1, 1.5])
def test_a_text_beyond_the_length_of_the_model_has_a_whole_number_of_tokens(count):
  with pytest.raises(UserError, match=f'count is {count}: expected a whole number of 1 or more'):
    generate_on(make(), {}, [[1]], count)


def test_a_model_that_is_not_causal_writes_nothing():
  with pytest.raises(UserError, match='not causal'):
    generate(make(causal=False), {}, [[1]], 2)
