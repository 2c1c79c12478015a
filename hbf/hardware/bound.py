"""An estimate of a program's time: its operations and traffic over the device's rates.

This is the roofline model (Williams et al. 2009). It is no bound: traffic is what instructions read and write, and a
cache may keep a part of it from the memory.
"""

from collections.abc import Mapping
from typing import NamedTuple

from hbf.hardware.chips import Chip
from hbf.hardware.hlo import COLLECTIVES, Collective

# Bytes that a device sends for each that a collective of n devices gives, n large: each of a ring's n − 1 steps sends
# 1/n, and an all-reduce goes around twice.
_SENT = dict.fromkeys(COLLECTIVES, 1.0) | {'all-reduce': 2.0}


class Bound(NamedTuple):
  """Seconds that a program would take for each of three reasons alone.

  Attributes:
    compute: its matrix products at the full rate of their type.
    memory: what it reads and writes at the memory's full rate, as if nothing stayed in a cache.
    network: what its collectives send at the full rate of the slowest links on the way.
  """

  compute: float
  memory: float
  network: float

  @property
  def seconds(self) -> float:
    """The greatest of the three, the estimate."""
    return max(self)

  @property
  def limit(self) -> str:
    """The name of the greatest."""
    return max(self._fields, key=lambda name: getattr(self, name))


def bound(
  chip: Chip,
  products: Mapping[str, float],
  memory: float,
  network: Mapping[Collective, float] | None = None,
) -> Bound:
  """Return the estimate for a program.

  Args:
    chip: what it runs on.
    products: operations of one device, as `hbf.models.flops.count_products` names them.
    memory: bytes that one device reads and writes.
    network: bytes by collective, as `hbf.hardware.hlo.count_traffic` has them.
  """
  compute = sum(count / chip.flops[kind] for kind, count in products.items())
  fast, slow = 0.0, 0.0
  for among, count in (network or {}).items():
    sent = _SENT[among.kind] * count
    fast += sent * (1 - 1 / among.devices) / chip.network
    if chip.network_between_hosts is not None:  # a group's devices on a host share what leaves it
      slow += sent * (1 - 1 / among.hosts) * among.hosts / among.devices / chip.network_between_hosts
  return Bound(compute, memory / chip.memory_bandwidth, max(fast, slow))
