"""Inputs of texts: a text in device memory, or a stream of windows. Both give bit-identical windows."""

import dataclasses
import functools
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hbf.data.pipeline import host
from hbf.data.pipeline.host import HostBatch
from hbf.data.pipeline.inputs import Batch, Input, ResidentInput, is_resident
from hbf.data.pipeline.order import TrainOrder, step_keys
from hbf.data.pipeline.workers import read_in_threads
from hbf.data.text.windows import LARGEST, Text, Tokens, draw_starts
from hbf.errors import UserError


class ShiftedOrder(TrainOrder):
  """A `TrainOrder` of windows. It tells a `TextStream` to begin them at random positions (`draw_starts`)."""


class TextInput(ResidentInput):
  """An input that holds a text in the memory of every device."""

  resident: Tokens

  def __init__(self, source: Text, sharding: NamedSharding):
    """Copy the text to every device. `sharding` is the sharding of batches over their first axis."""
    super().__init__(sharding)
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    tokens = jax.make_array_from_callback(source.tokens.shape, replicated, lambda at: source.tokens[at])
    self._count = len(source)
    self.resident = Tokens(tokens, source.length)


class TextStream(Input):
  """An input that reads windows on the host, for a text that is too long for the memory of a device."""

  def __init__(self, source: Text, sharding: NamedSharding):
    """Store the text. `sharding` is the sharding of batches over their first axis."""
    super().__init__(sharding)
    self.resident = None
    self._source = source

  def __len__(self) -> int:
    return len(self._source)

  def _host_batches(
    self, order: host.Order, start: int, stop: int, rows: np.ndarray
  ) -> Generator[HostBatch, None, None]:
    if start < stop:
      yield from read_in_threads(_WindowBatches(self._source, order, start, stop, rows))


def make_text_input(kind: str, source: Text, sharding: NamedSharding, resident_bytes: int) -> Input:
  """Make the input for a text.

  Args:
    kind: `device` (the text in device memory), `stream` (windows from the host) or `auto`. `auto` is `device` if the
      text fits into `resident_bytes`, else `stream`.
    source: the text.
    sharding: sharding of batches over their first axis.
    resident_bytes: the most bytes of text that `auto` puts on each device.

  Raises:
    UserError: the kind is unknown, or the kind is `device` and the text is too long for positions of 32 bits.
  """
  return (TextInput if _is_resident(kind, source, resident_bytes) else TextStream)(source, sharding)


def abstract_text_input(
  kind: str, source: Text, sharding: NamedSharding, resident_bytes: int, *leading: int
) -> tuple[Tokens | None, Batch]:
  """Return an input's `resident` and a batch as `jax.ShapeDtypeStruct`s, for which a step can be compiled.

  Args:
    kind: kind of the input; see `make_text_input`.
    source: the text.
    sharding: sharding of batches over their first axis.
    resident_bytes: see `make_text_input`.
    *leading: lengths of the first axes: B for a batch of B rows, or S, B for a stack of S batches.

  Raises:
    UserError: see `make_text_input`.
  """
  array: Any = jax.ShapeDtypeStruct
  batches = NamedSharding(sharding.mesh, PartitionSpec(*(None for _ in leading[1:]), *sharding.spec))
  index = {'index': array(leading, jnp.int32, sharding=batches)}
  if _is_resident(kind, source, resident_bytes):
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return Tokens(array(source.tokens.shape, source.tokens.dtype, sharding=whole), source.length), index
  tokens = array((*leading, source.length + 1), source.tokens.dtype, sharding=batches)
  return None, {**index, 'tokens': tokens, 'count': array(leading, jnp.int32, sharding=batches)}


@dataclasses.dataclass(frozen=True)
class _WindowBatches:
  """The batches start, …, stop − 1 of an order, as a sequence. Each batch has only its rows `rows`, int [n]."""

  source: Text
  order: host.Order
  start: int
  stop: int
  rows: np.ndarray

  def __len__(self) -> int:
    return self.stop - self.start

  def __getitem__(self, number: int) -> HostBatch:
    step, tokens, length = self.start + number, self.source.tokens, self.source.length
    index = self.order(step)[self.rows]
    if isinstance(self.order, ShiftedOrder):
      starts = _draw_on_host(self.order.seed, step, index, self.source)
    else:
      starts = np.where(index >= 0, index.astype(np.int64) * length, len(tokens))
    positions = starts[:, None] + np.arange(length + 1)
    mask = positions < len(tokens)
    found = np.where(mask, tokens[np.where(mask, positions, 0)], 0)
    return {'index': index, 'tokens': found.astype(tokens.dtype), 'count': mask.sum(axis=1, dtype=np.int32)}


def _is_resident(kind: str, source: Text, resident_bytes: int) -> bool:
  fits = source.fits_32_bits
  if kind == 'device' and not fits:
    raise UserError(
      f'a text has {len(source.tokens):,} tokens; expected at most {LARGEST - source.length:,} in device memory: set '
      'data.input to auto or stream'
    )
  return is_resident(kind, fits and source.tokens.nbytes <= resident_bytes)


@functools.partial(jax.jit, static_argnames=('seed', 'tokens', 'length'))
def _draw_starts(seed: int, step: int, index: jax.Array, tokens: int, length: int) -> jax.Array:
  (key, _), _ = step_keys(seed, step)
  return draw_starts(key, index, tokens, length)


def _draw_on_host(seed: int, step: int, index: np.ndarray, source: Text) -> np.ndarray:
  """Return the positions, int64 [B], at which the windows `index` [B] of a step begin; see `shifted_windows`.

  The CPU draws them, because an accelerator would first finish the steps that wait in its queue.
  """
  with jax.default_device(_cpu()), jax.enable_x64(not source.fits_32_bits):
    starts = _draw_starts(seed, np.int32(step), index, len(source.tokens), source.length)
    return np.asarray(starts, np.int64)


def _cpu() -> jax.Device | None:
  """Return the CPU as a device of JAX. None if the environment variable JAX_PLATFORMS excludes it."""
  try:
    return jax.local_devices(backend='cpu')[0]
  except RuntimeError:
    return None
