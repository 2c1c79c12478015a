"""The least time that a program can take: what it computes and moves, over the device's rates (roofline)."""

from collections.abc import Mapping
from typing import NamedTuple

from hbf.hardware.chips import Chip
from hbf.hardware.hlo import COLLECTIVES, Collective

# Bytes that a device sends for each that a collective of n devices gives, n large: each of a ring's n − 1 steps sends
# 1/n, and an all-reduce goes around twice.
_SENT = dict.fromkeys(COLLECTIVES, 1.0) | {'all-reduce': 2.0}


class Bound(NamedTuple):
  """Seconds that a program takes at least, for each of three reasons; no two of them have to overlap fully.

  Attributes:
    compute: its matrix products at the full rate of their type.
    memory: what it reads and writes at the memory's full rate.
    network: what its collectives send at the full rate of the slowest links on the way.
  """

  compute: float
  memory: float
  network: float

  @property
  def seconds(self) -> float:
    """The greatest of the three."""
    return max(self)

  @property
  def limit(self) -> str:
    """Which of them it is."""
    return max(self._fields, key=lambda name: getattr(self, name))


def bound(
  chip: Chip,
  products: Mapping[str, float],
  memory: float,
  network: Mapping[Collective, float] | None = None,
) -> Bound:
  """The bound of a program.

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
