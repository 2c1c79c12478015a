"""Topologies: connected chips of one kind, with names such as v5e-16 or h100-8.

XLA compiles programs for the virtual devices of a topology, which this machine need not have.
"""

import bisect
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies

from hbf.errors import UserError, choose
from hbf.hardware.chips import CHIPS, Chip, GpuChip, TpuChip, target_config

GPUS_PER_HOST = 8
# By platform: the module with its compiler, the packages whose versions affect the compiled program, and the
# requirement that installs them.
_COMPILERS = {
  'tpu': ('libtpu', ('libtpu',), 'jax[tpu]'),
  'cuda': ('jax_cuda12_plugin', ('jax-cuda12-plugin', 'nvidia-cudnn-cu12'), 'jax[cuda12]'),
}
# These variables let the compilers start without devices. Otherwise libtpu asks a metadata server that only Google's
# machines have, and allows only one process; and JAX asks CUDA's driver for its version.
_ENVIRONMENT = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-1',  # any type will do for every topology
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'JAX_SKIP_CUDA_CONSTRAINTS_CHECK': '1',
}


@dataclasses.dataclass(frozen=True)
class Topology:
  """Connected devices, which are all the same kind of chip.

  Attributes:
    name: the name as given, such as 'v5e-16'.
    chip: the kind of chip.
    devices: number of JAX devices, one for each chip.
    hosts: number of hosts, each with one JAX process.
  """

  name: str
  chip: TpuChip | GpuChip
  devices: int
  hosts: int

  @property
  def shape(self) -> tuple[int, ...]:
    """The sides of a TPU slice in chips. For GPUs, the number of hosts and the number of GPUs on each host."""
    if isinstance(self.chip, TpuChip):
      return _sides(self.devices, self.chip.dimensions)
    return self.hosts, self.devices // self.hosts

  def compiler_versions(self) -> dict[str, str]:
    """Return the versions of the packages that compile for the devices."""
    _, packages, _ = _COMPILERS[self.chip.platform]
    return {name: importlib.metadata.version(name) for name in packages}

  def compile_devices(self) -> list[Any]:
    """Return virtual devices for a mesh. XLA can compile programs for them, but they cannot run a program.

    The process still computes on its own platform. At its first computation, JAX drops the plugin of a platform for
    which it finds no devices. So call this method earlier, or set JAX_PLATFORMS to a value that does not name the
    topology's platform.

    Raises:
      UserError: the platform's compiler is not installed.
    """
    _require_compiler(self)
    for variable, value in _ENVIRONMENT.items():
      os.environ.setdefault(variable, value)
    options: dict[str, Any]
    if isinstance(self.chip, GpuChip):
      name = 'cuda'
      options = {'target_config': target_config(self.chip), 'topology': '1x{}x{}'.format(*self.shape)}
    else:
      name = f'{self.chip.name}:{"x".join(map(str, self.shape))}'
      options = {
        # If there are several hosts, each has 2x2 chips.
        'chips_per_host_bounds': [*self.shape, 1][:3] if self.hosts == 1 else [2, 2, 1],
        # Both cores of a v4 or v5p chip are one device.
        'chip_config_name': 'megacore' if self.chip.cores_in_names == 2 else 'default',
      }
    return list(topologies.get_topology_desc(name, self.chip.platform, **options).devices)

  @contextlib.contextmanager
  def tracing(self) -> Iterator[None]:
    """Open a context in which JAX traces programs as if this machine had the topology's chip.

    cuDNN's attention depends on the compute capability of the GPU. Outside this context, JAX asks the process's own
    GPU.
    """
    if not isinstance(self.chip, GpuChip):
      yield
      return
    ours = self.chip.compute_capability

    def has(capability: str) -> bool:
      return ours >= tuple(map(int, capability.split('.')))

    with mock.patch.object(fused_attention_stablehlo, 'check_compute_capability', has):
      yield


def parse_topology(name: str) -> Topology:
  """Parse the name of a topology such as v4-8 (8 TensorCores), v5e-16 (16 chips) or h100-8 (8 GPUs).

  Raises:
    UserError: the name has another form, the chip is unknown, or there is no topology with this number of chips.
  """
  parts = re.fullmatch(r'(\w+)-([1-9][0-9]*)', name)
  if not parts:
    raise UserError(f'topology {name!r} is unknown: expected a chip and a number, such as v5e-16 or h100-8')
  chip = choose('chip', parts[1], CHIPS)
  count = int(parts[2])
  if isinstance(chip, TpuChip):
    _require_count(name, chip, count, [chips * chip.cores_in_names for chips in chip.slices])
    chips = count // chip.cores_in_names
    # A machine holds 4 chips. v5e and v6e also have machines of 8 chips, but only as slices of a single machine
    # (Cloud TPU, TPU v5e and v6e, VM types).
    alone = 8 if chip.dimensions == 2 else 4
    return Topology(name, chip, chips, 1 if chips <= alone else chips // 4)
  hosts = -(-count // GPUS_PER_HOST)
  if hosts > 1:
    _require_count(name, chip, count, [(hosts - 1) * GPUS_PER_HOST, hosts * GPUS_PER_HOST])
  return Topology(name, chip, count, hosts)


def _sides(chips: int, dimensions: int) -> tuple[int, ...]:
  """Return the sides of a TPU slice of 2^n chips: powers of two, as equal as possible."""
  if dimensions == 3 and chips == 4:
    return 2, 2, 1  # one host, flat
  exponent = chips.bit_length() - 1
  return tuple(2 ** ((exponent + i) // dimensions) for i in range(dimensions))


def _require_count(name: str, chip: Chip, count: int, known: list[int]) -> None:
  """Check that `count`, the number in a topology's name, is in the ascending list `known` of possible numbers.

  Raises:
    UserError: there is no such topology. The message names the nearest ones.
  """
  if count in known:
    return
  index = bisect.bisect(known, count)
  nearest = ' or '.join(f'{chip.name}-{n}' for n in known[max(index - 1, 0) : index + 1])
  raise UserError(f'topology {name!r} does not exist: {chip.kind}s do not come in this number. Use {nearest}')


def _require_compiler(topology: Topology) -> None:
  module, _, requirement = _COMPILERS[topology.chip.platform]
  if importlib.util.find_spec(module) is None:
    raise UserError(
      f'{topology.name} needs the compiler of {topology.chip.kind}s, {module}, which is not installed: '
      f'pip install "{requirement}", in an environment of its own'
    )
