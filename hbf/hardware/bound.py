"""A time estimate for a program, from its operations and traffic and the device's rates.

This is the roofline model (Williams et al. 2009). It is not a bound: traffic counts all bytes that instructions read
and write, but a cache may hold a part of them.
"""

from collections.abc import Mapping
from typing import NamedTuple

from hbf.hardware.chips import Chip
from hbf.hardware.hlo import COLLECTIVES, Collective

# Bytes that a device sends for each byte of a collective's result, for many devices. A ring of n devices takes n − 1
# steps that send 1/n each. An all-reduce goes around the ring twice.
_SENT_RATIO = dict.fromkeys(COLLECTIVES, 1.0) | {'all-reduce': 2.0}


class Bound(NamedTuple):
  """Seconds that a program would take if only one resource limited it.

  Attributes:
    compute: time of its matrix products at the peak rate of their type.
    memory: time of its reads and writes at the peak memory bandwidth, without a cache.
    network: time of its collectives at the rate of the slowest links in use.
  """

  compute: float
  memory: float
  network: float

  @property
  def seconds(self) -> float:
    """The estimate: the greatest of the three."""
    return max(self)

  @property
  def limit(self) -> str:
    """Name of the greatest."""
    return max(self._fields, key=lambda name: getattr(self, name))


def bound(
  chip: Chip,
  products: Mapping[str, float],
  memory: float,
  network: Mapping[Collective, float] | None = None,
) -> Bound:
  """Estimate the time of a program.

  Args:
    chip: the chip that it runs on.
    products: operations of one device by type, as returned by `hbf.models.flops.count_products`.
    memory: bytes that one device reads and writes.
    network: bytes by collective, as returned by `hbf.hardware.hlo.count_traffic`.
  """
  compute = sum(count / chip.flops[kind] for kind, count in products.items())
  fast, slow = 0.0, 0.0
  for among, count in (network or {}).items():
    sent = _SENT_RATIO[among.kind] * count
    fast += sent * (1 - 1 / among.devices) / chip.network
    if chip.network_between_hosts is not None:  # the devices of a group on one host share its traffic to other hosts
      slow += sent * (1 - 1 / among.hosts) * among.hosts / among.devices / chip.network_between_hosts
  return Bound(compute, memory / chip.memory_bandwidth, max(fast, slow))
