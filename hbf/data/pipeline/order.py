"""The examples of step s: a pure function of (seed, s).

The step is therefore the whole state of the input, and a resumed run sees exactly the examples of an uninterrupted
run.
"""

import dataclasses
import functools
from typing import Any

import numpy as np


@functools.lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, examples: int) -> np.ndarray:
  """Return a pseudo-random permutation of range(examples), int32 [examples], a function of its arguments.

  It sorts Philox's raw numbers instead of calling `Generator.permutation`, since NumPy promises the same stream
  in every version for bit generators but not for generators. The array is shared: it can't be written to.
  """
  generator = np.random.Philox(key=np.array([seed % 2**64, epoch], np.uint64))
  order = np.argsort(generator.random_raw(examples), kind='stable').astype(np.int32)
  order.flags.writeable = False
  return order


def evenly_spaced(examples: int, most: int) -> np.ndarray:
  """Return at most `most` of the numbers 0, …, examples − 1, evenly spaced: int64 [n]."""
  count = min(examples, most)
  return np.arange(count) * examples // max(count, 1)


@dataclasses.dataclass(frozen=True)
class TrainOrder:
  """An endless stream of shuffled epochs, cut into batches.

  The stream is the concatenation of one permutation an epoch: position p holds permutation_{p // n}[p % n], with n
  the number of examples. A batch may straddle epochs, so no example is ever dropped.

  Attributes:
    seed: seed of the permutations.
    examples: number of examples in an epoch, at least 1.
    batch_size: number of examples in a step.
  """

  seed: int
  examples: int
  batch_size: int

  def __call__(self, step: int) -> np.ndarray:
    """Return the examples of `step`, int32 [batch_size]."""
    positions = step * self.batch_size + np.arange(self.batch_size, dtype=np.int64)
    epochs, offsets = np.divmod(positions, self.examples)
    indices = np.empty(self.batch_size, np.int32)
    for epoch in range(epochs[0], epochs[-1] + 1):
      rows = epochs == epoch
      indices[rows] = permutation(self.seed, epoch, self.examples)[offsets[rows]]
    return indices

  def epochs(self, step: Any) -> Any:
    """Return the epoch of each row of `step`, int32 [batch_size].

    Args:
      step: number of the step, from 0; it may be a traced int32.
    """
    # step · batch_size is computed bit by bit as epochs and a remainder: the product itself may exceed 32 bits.
    whole, rest = step // self.examples, step % self.examples
    epoch, offset = 0, 0
    for bit in map(int, f'{self.batch_size:b}'):
      epoch, offset = 2 * epoch + bit * whole, 2 * offset + bit * rest
      epoch, offset = epoch + offset // self.examples, offset % self.examples
    return epoch + (offset + np.arange(self.batch_size, dtype=np.int32)) // self.examples


@dataclasses.dataclass(frozen=True)
class EvalOrder:
  """Every example once, in order. The last batch is padded with −1.

  Attributes:
    examples: number of examples.
    batch_size: number of rows of every batch.
  """

  examples: int
  batch_size: int

  def __call__(self, step: int) -> np.ndarray:
    """Return the examples of batch `step`, int32 [batch_size], −1 past the end."""
    indices = step * self.batch_size + np.arange(self.batch_size, dtype=np.int64)
    return np.where(indices < self.examples, indices, -1).astype(np.int32)

  def __len__(self) -> int:
    """Return the number of batches that hold an example."""
    return -(-self.examples // self.batch_size)
