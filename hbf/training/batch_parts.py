"""The number of parts in which a step computes a batch (`train.accumulate`)."""

import flax.linen as nn
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from hbf.models.build import draws_numbers
from hbf.training.machine import cores
from hbf.training.sharding import batch_shares

TOKENS = 2048  # in a part: see docs/research/speed.md


def batch_parts(config: ConfigDict, model: nn.Module, shape: tuple[int, ...], mesh: Mesh) -> int:
  """Return the number of parts in which a step computes a batch.

  This is the key `train.accumulate`, if it is not 0. Else it is 1, except for images if each device is one core of a
  CPU. The activations of a whole batch do not fit into the core's caches. So each device computes its share of the
  batch in parts of at most 2048 tokens, and of at least half as many. With several cores in a device, XLA splits each
  operation over the cores, and parts are slower for some models.

  The number stays 1 where parts would change more than the rounding of a step: if the network draws random numbers in
  training, as for dropout, these would depend on the number of devices. It is also 1 for several processes, which may
  run on different machines.

  Args:
    config: the config of the run.
    model: its network.
    shape: the shape of an example.
    mesh: the devices.
  """
  if config.train.accumulate:
    return config.train.accumulate
  on_cores = mesh.devices.flat[0].platform == 'cpu' and cores() <= mesh.size and jax.process_count() == 1
  if not on_cores or 'patch' not in config.model:
    return 1
  height, width, _ = shape
  tokens = (height // config.model.patch) * (width // config.model.patch)
  images, most = config.train.batch_size // batch_shares(mesh), TOKENS // tokens
  sizes = [size for size in range(max(most // 2, 1), most + 1) if images % size == 0]
  if images <= most or not sizes or draws_numbers(model, shape):
    return 1
  return images // sizes[-1]
