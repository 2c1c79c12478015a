"""Tests of the windows of a text, in device memory and as a stream."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hbf.data.pipeline.order import EvalOrder, step_keys
from hbf.data.text.inputs import ShiftedOrder, TextInput, TextStream, make_text_input
from hbf.data.text.windows import Text, Tokens, draw_starts, shifted_windows, windows
from hbf.errors import UserError

TOKENS = np.random.default_rng(0).integers(0, 200, 1000).astype(np.uint8)


def test_windows_cover_a_text_once_and_end_with_it():
  text = Text(TOKENS, 64)
  batch = {'index': jnp.array([*range(len(text)), -1])}
  found, there = windows(Tokens(jnp.asarray(TOKENS), 64), batch)
  next_ones = np.asarray(found)[:, 1:][np.asarray(there)[:, 1:]]
  np.testing.assert_array_equal(next_ones, TOKENS[1:])
  np.testing.assert_array_equal(found[3], TOKENS[192:257])
  assert not there[-1].any() and not np.asarray(found)[~np.asarray(there)].any()


def test_a_text_of_whole_windows_has_no_empty_one():
  assert [len(Text(TOKENS[:n], 64)) for n in (2, 64, 65, 66, 129)] == [1, 1, 1, 2, 2]


def test_shifted_windows_are_of_the_text_and_each_a_function_of_key_and_number():
  text, key = Tokens(jnp.asarray(TOKENS), 64), jax.random.key(3)
  index = jnp.arange(15)
  found = np.asarray(shifted_windows(key, text, {'index': index}))
  starts = {tuple(TOKENS[at : at + 65]): at for at in range(1000 - 64)}
  assert all(tuple(row) in starts for row in found)
  np.testing.assert_array_equal(shifted_windows(key, text, {'index': index[::-1]}), found[::-1])
  assert (np.asarray(shifted_windows(jax.random.key(4), text, {'index': index})) != found).any()


def test_every_place_is_where_a_window_begins_as_often_as_another():
  tokens = np.arange(40, dtype=np.uint8)  # 31 places; the last two of five windows draw beyond them
  text, keys = Tokens(jnp.asarray(tokens), 9), jax.random.split(jax.random.key(0), 3100)
  starts = jax.jit(jax.vmap(lambda key: shifted_windows(key, text, {'index': jnp.arange(5)})[:, 0]))(keys)
  counts = np.bincount(np.asarray(starts).ravel(), minlength=40)
  # The expected count at each place is 500, with a standard deviation of at most 22.
  assert counts[:31].min() > 410 and counts[:31].max() < 590 and not counts[31:].any()


def sharding_over(devices):
  return NamedSharding(Mesh(np.asarray(jax.devices()[:devices]), ('data',)), PartitionSpec('data'))


@pytest.mark.parametrize('seed', [0, 2**32 - 1])
@pytest.mark.parametrize('devices', [1, 8])
def test_a_stream_has_the_windows_of_a_text_in_device_memory(devices, seed):
  """A batch of training has 16 of 17 windows. So every step has one of the last two, which may begin anywhere."""
  text, sharding = Text(TOKENS, 61), sharding_over(devices)
  found = []
  for data in (TextInput(text, sharding), TextStream(text, sharding)):
    train, test = ShiftedOrder(seed, len(data), 16), EvalOrder(len(data), 8)
    shift = jax.jit(lambda step, *about: shifted_windows(step_keys(seed, step)[0][0], *about))
    steps = enumerate(data.batches(train, 3, 7), 3)
    shifted = [shift(step, data.resident, batch) for step, batch in steps]
    found.append((shifted, [jax.jit(windows)(data.resident, batch) for batch in data.batches(test, 0, len(test))]))
  jax.tree.map(np.testing.assert_array_equal, *found)


def test_a_stream_is_stacked():
  text, order = Text(TOKENS, 61), ShiftedOrder(5, 17, 4)
  data = TextStream(text, sharding_over(1))
  first, last = data.stacks(order, 0, [2, 1], 2)
  batches = [*data.batches(order, 0, 3)]
  for name in ('index', 'tokens', 'count'):
    np.testing.assert_array_equal(np.concatenate([first[name], last[name][:1]]), [batch[name] for batch in batches])


@pytest.mark.parametrize(
  ('kind', 'most', 'expected'),
  [('auto', 1000, TextInput), ('auto', 999, TextStream), ('stream', 1000, TextStream), ('device', 999, TextInput)],
)
def test_a_text_that_does_not_fit_is_streamed(kind, most, expected):
  assert type(make_text_input(kind, Text(TOKENS, 64), sharding_over(1), most)) is expected


def test_positions_beyond_32_bits_are_drawn_and_read():
  """The positions of the last windows are at most L − T − 1."""
  tokens, length = 2**31 + 1000, 2**14
  text = Text(np.broadcast_to(np.uint8(7), tokens), length)
  data = make_text_input('auto', text, sharding_over(1), 2**40)
  with jax.enable_x64(True):
    index = np.array([0, len(data) - 20, len(data) - 1], np.int32)
    draw = functools.partial(draw_starts, index=index, tokens=tokens, length=length)
    starts = np.array(jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), 200)))
  assert starts[:, 0].min() >= 0 and starts[:, 0].max() < length
  assert index[1] * length <= starts[:, 1].min() and starts[:, 1].max() < (index[1] + 1) * length
  assert starts[:, 2].min() >= 0 and starts[:, 2].max() < tokens - length and np.ptp(starts[:, 2]) > 2**30
  for order in (ShiftedOrder(0, len(data), 4), EvalOrder(len(data), 4)):
    batch = next(data.batches(order, len(data) // 4 - 1, len(data) // 4))
    assert (batch['tokens'][0] == 7).all() and batch['count'][0] == length + 1


def test_a_text_that_32_bits_can_not_number_is_refused_in_device_memory():
  tokens = np.broadcast_to(np.uint8(0), 2**31)
  assert len(Text(tokens[: 2**31 - 65], 64)) == 2**25 - 1
  with pytest.raises(UserError, match='2,147,483,648 tokens; expected at most 2,147,483,583 in device memory'):
    make_text_input('device', Text(tokens, 64), sharding_over(1), 0)


def test_batches_are_the_same_on_any_number_of_devices():
  found = []
  for devices in (1, 8):
    data = TextInput(Text(TOKENS, 64), sharding_over(devices))
    order = EvalOrder(len(data), 8)
    take = jax.jit(windows)
    found.append([np.asarray(take(data.resident, batch)[0]) for batch in data.batches(order, 0, len(order))])
  np.testing.assert_array_equal(*found)
