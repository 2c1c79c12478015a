"""Tests of the inputs of a language model, and of its loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hbf.config.recipes import make_text_config
from hbf.data.text.texts import Texts
from hbf.data.text.tokenizers import Characters
from hbf.data.text.windows import Tokens
from hbf.errors import UserError
from hbf.tasks.registry import make_task

LETTERS = Characters('abcdefghij')
TEXT = np.random.default_rng(0).integers(0, 10, 300).astype(np.uint8)


def task(name='next_token', length=16, smoothing=0.0, **splits):
  config = make_text_config('', {'name': 'letters', 'length': length})
  config.update({'task': name, 'train': {'label_smoothing': smoothing}})
  return make_task(config, Texts('letters', LETTERS, {'train': TEXT, 'test': TEXT[:100], **splits}))


def seen(made, index, train=False):
  resident = Tokens(jnp.asarray(TEXT), made.length)
  keys = tuple(jax.random.split(jax.random.key(1)))
  batch = {'index': jnp.asarray(index)}
  return made.train_batch(keys, resident, batch) if train else made.eval_batch(resident, batch)


def test_the_next_token_of_each_is_the_goal():
  inputs, (labels, counted) = seen(task(), [0, 3, 18, -1])
  np.testing.assert_array_equal(inputs[1], TEXT[48:64])
  np.testing.assert_array_equal(labels[1], TEXT[49:65])
  assert counted[:2].all() and counted[2].sum() == 300 - 18 * 16 - 1 and not counted[3].any()
  inputs, (labels, counted) = seen(task(), [0, 3, 18], train=True)
  assert counted.all()
  np.testing.assert_array_equal(inputs[:, 1:], labels[:, :-1])


@pytest.mark.parametrize('train', [False, True])
def test_hidden_tokens_are_as_many_in_every_window_and_the_goal(train):
  made = task('masked_token', length=20)
  inputs, (labels, counted) = seen(made, range(14), train)
  assert made.predictions == 3 and (counted.sum(axis=1) == 3).all()
  np.testing.assert_array_equal(inputs == 10, counted)
  np.testing.assert_array_equal(jnp.where(counted, labels, inputs), labels)
  alone, (_, of_one) = seen(made, [5], train)
  np.testing.assert_array_equal(alone[0], inputs[5])
  assert len({tuple(row) for row in np.asarray(counted)}) > 10 and (of_one[0] == counted[5]).all()


@pytest.mark.parametrize(('name', 'smoothing'), [('next_token', 0.0), ('next_token', 0.1), ('masked_token', 0.1)])
def test_the_loss_is_the_mean_over_what_counts(name, smoothing):
  made = task(name, length=20, smoothing=smoothing)
  _, (labels, counted) = seen(made, range(6), train=True)
  logits = jax.random.normal(jax.random.key(2), (*labels.shape, 11))
  targets = optax.smooth_labels(jax.nn.one_hot(labels, 11), smoothing)
  expected = np.mean(optax.softmax_cross_entropy(logits, targets)[counted])
  loss, right = made.loss(logits, (labels, counted))
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert right == ((jnp.argmax(logits, -1) == labels) & counted).sum()
  parts = [made.loss(logits[at], (labels[at], counted[at]))[0] for at in (slice(0, 3), slice(3, 6))]
  np.testing.assert_allclose(np.mean(parts), loss, rtol=1e-5)


def test_outcomes_of_texts_average_to_the_figure():
  made = task()
  counts, kept = made.empty_counts(), {'nll': [], 'tokens': []}
  for index in ([0, 1, 2], [17, 18, -1]):
    goal = seen(made, index).targets
    counts, of_batch = made.add_counts(counts, jax.random.normal(jax.random.key(3), (3, 16, 10)), goal)
    for name, values in of_batch.items():
      kept[name] += values[: sum(i >= 0 for i in index)].tolist()
  found = made.summarize(counts, {})
  assert found['n'] == sum(kept['tokens']) == 4 * 16 + 11
  outcomes = made.example_scores({name: np.array(values) for name, values in kept.items()})
  assert outcomes.mean() == pytest.approx(found[made.scores[0].name], rel=1e-5)


def test_the_end_of_train_is_held_out():
  splits = task().splits(0.2)
  np.testing.assert_array_equal(splits['train'].tokens, TEXT[:240])
  np.testing.assert_array_equal(splits['validation'].tokens, TEXT[240:])
  assert task().splits(0.0).keys() == {'train', 'test'}


def test_a_text_shorter_than_a_window_is_not_evaluated_with_masks():
  made = task('masked_token')
  task('masked_token', test=TEXT[: made.length]).splits(0.1)
  with pytest.raises(UserError, match=r'text to test on, of letters, has 15 tokens: expected 16 or more'):
    task('masked_token', test=TEXT[: made.length - 1]).splits(0.1)
  for count in (made.length - 1, made.length):
    assert ('validation' in made.splits(count / len(TEXT))) is (count == made.length)


def test_hidden_tokens_of_an_incomplete_window_do_not_count():
  made = task('masked_token')
  _, (_, counted) = seen(made, [17, 18])
  assert len(TEXT) % made.length and counted.sum(axis=1).tolist() == [made.predictions, 0]


def test_bytes_of_a_character_count_each():
  made = task()
  umlauts = Texts('umlauts', Characters('abcdefghiä'), {'train': TEXT, 'test': TEXT})
  wide = dataclasses.replace(made, dataset=umlauts)
  goal, logits = seen(made, [0, 1]).targets, jnp.zeros((2, 16, 10))
  plain, other = (each.summarize(*each.add_counts(each.empty_counts(), logits, goal)) for each in (made, wide))
  assert plain['bytes'] == 32 and other['bytes'] == 32 + int((goal[0] == 9).sum())
  assert plain['bits_per_byte'] == pytest.approx(np.log2(10), rel=1e-5)


def test_a_text_shorter_than_a_window_is_refused():
  with pytest.raises(UserError, match=r'the text to train on has 300 tokens, a window has 300: .* data.length'):
    task(length=300).splits(0.0)
  with pytest.raises(UserError, match='the text to test on, of letters, has 1 tokens: expected 2 or more'):
    task(test=TEXT[:1]).splits(0.0)
