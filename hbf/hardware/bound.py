"""An estimate of a program's time, from its operations, its traffic and the peak rates of the device.

This is the roofline model (Williams et al. 2009). The real time may be shorter: the traffic counts all bytes that
instructions read and write, but some may come from a cache.
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
    compute: time of the program's matrix products at the peak rate of their type.
    memory: time of the program's reads and writes at the peak memory bandwidth, without a cache.
    network: time of the program's collectives (communication between devices) at the rate of the slowest links in
      use.
  """

  compute: float
  memory: float
  network: float

  @property
  def seconds(self) -> float:
    """The estimated time of the program in seconds: the greatest of `compute`, `memory` and `network`."""
    return max(self)

  @property
  def limit(self) -> str:
    """The resource with the greatest time: 'compute', 'memory' or 'network'."""
    return max(self._fields, key=lambda name: getattr(self, name))


def bound(
  chip: Chip,
  products: Mapping[str, float],
  memory: float,
  network: Mapping[Collective, float] | None = None,
) -> Bound:
  """Return an estimate of a program's time.

  Args:
    chip: the chip that the program runs on.
    products: floating-point operations of the matrix products on one device, by type (as in `Chip.flops`). These are
      the counts of `hbf.models.flops.count_products`, divided by the number of devices.
    memory: bytes that one device reads and writes.
    network: bytes that one device moves in each kind of collective (`hbf.hardware.hlo.count_traffic`). None: the
      program has no collectives.
  """
  compute = sum(count / chip.flops[kind] for kind, count in products.items())
  fast, slow = 0.0, 0.0
  for among, count in (network or {}).items():
    sent = _SENT_RATIO[among.kind] * count
    fast += sent * (1 - 1 / among.devices) / chip.network
    if chip.network_between_hosts is not None:  # the devices of a group on one host share its traffic to other hosts
      slow += sent * (1 - 1 / among.hosts) * among.hosts / among.devices / chip.network_between_hosts
  return Bound(compute, memory / chip.memory_bandwidth, max(fast, slow))
