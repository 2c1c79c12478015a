"""Topologies by name, such as v5e-16 or h100-8, and the devices that XLA compiles for in their stead."""

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

GPUS_A_HOST = 8
# By platform: the module that brings its compiler, the packages whose versions change what it makes, and the
# requirements that install them.
_COMPILERS = {
  'tpu': ('libtpu', ('libtpu',), 'requirements-tpu.txt'),
  'cuda': ('jax_cuda12_plugin', ('jax-cuda12-plugin', 'nvidia-cudnn-cu12'), 'requirements-gpu.txt'),
}
# What lets the compilers start where their devices aren't: libtpu would ask a metadata server that only Google's
# machines have, complain of what it doesn't learn there, and let one process alone load it; JAX would ask CUDA's
# driver for its version.
_ENVIRONMENT = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-1',  # whatever the topology
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'JAX_SKIP_CUDA_CONSTRAINTS_CHECK': '1',
}


@dataclasses.dataclass(frozen=True)
class Topology:
  """Devices of one chip and how they are joined."""

  name: str  # as asked: 'v5e-16'
  chip: TpuChip | GpuChip
  devices: int  # as JAX counts them: one a chip
  hosts: int  # processes of JAX

  @property
  def shape(self) -> tuple[int, ...]:
    """A TPU slice's mesh; of GPUs, hosts and GPUs a host."""
    if isinstance(self.chip, TpuChip):
      return _mesh(self.devices, self.chip.dimensions)
    return self.hosts, self.devices // self.hosts

  def compiler_versions(self) -> dict[str, str]:
    """Versions of what compiles for the devices, by package."""
    _, packages, _ = _COMPILERS[self.chip.platform]
    return {name: importlib.metadata.version(name) for name in packages}

  def compile_devices(self) -> list[Any]:
    """Devices to put into a mesh and to lower and compile for; nothing can be executed on them.

    The process's own platform stays what it is. To be asked before JAX's first computation of the process, unless
    JAX_PLATFORMS leaves the platform's own devices out: JAX gives up a plugin whose devices it then doesn't find.

    Raises:
      UserError: the platform's compiler isn't installed.
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
        # A host of several has 2x2 chips.
        'chips_per_host_bounds': [*self.shape, 1][:3] if self.hosts == 1 else [2, 2, 1],
        # Both cores of a v4 or v5p chip are one device.
        'chip_config_name': 'megacore' if self.chip.cores_in_names == 2 else 'default',
      }
    return list(topologies.get_topology_desc(name, self.chip.platform, **options).devices)

  @contextlib.contextmanager
  def tracing(self) -> Iterator[None]:
    """Has JAX trace what it would trace beside these devices.

    What cuDNN's attention takes depends on the GPU, and JAX asks this process's: it hears of the chip instead.
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
  """Returns the topology of a name such as v4-8 (8 TensorCores), v5e-16 (16 chips) or h100-8 (8 GPUs).

  Raises:
    UserError: it isn't of this form, or there is no such chip or no such number of it.
  """
  parts = re.fullmatch(r'(\w+)-([1-9][0-9]*)', name)
  if not parts:
    raise UserError(f'topology {name!r}: expected a chip and a number, such as v5e-16 or h100-8')
  chip = choose('chip', parts[1], CHIPS)
  count = int(parts[2])
  if isinstance(chip, TpuChip):
    _require_count(name, chip, count, [chips * chip.cores_in_names for chips in chip.slices])
    chips = count // chip.cores_in_names
    # A machine holds 4 chips; of v5e and v6e there are machines of 8 too, which slices of several aren't made of
    # (Cloud TPU, TPU v5e and v6e, VM types).
    alone = 8 if chip.dimensions == 2 else 4
    return Topology(name, chip, chips, 1 if chips <= alone else chips // 4)
  hosts = -(-count // GPUS_A_HOST)
  if hosts > 1:
    _require_count(name, chip, count, [(hosts - 1) * GPUS_A_HOST, hosts * GPUS_A_HOST])
  return Topology(name, chip, count, hosts)


def _mesh(chips: int, dimensions: int) -> tuple[int, ...]:
  """Sides of a slice of 2^n chips: powers of two as equal as can be, ascending."""
  if dimensions == 3 and chips == 4:
    return 2, 2, 1  # one host, flat
  exponent = chips.bit_length() - 1
  return tuple(2 ** ((exponent + i) // dimensions) for i in range(dimensions))


def _require_count(name: str, chip: Chip, count: int, known: list[int]) -> None:
  """Refuses a number that isn't among the known ones (ascending), naming the nearest on either side."""
  if count in known:
    return
  place = bisect.bisect(known, count)
  nearest = ' or '.join(f'{chip.name}-{n}' for n in known[max(place - 1, 0) : place + 1])
  raise UserError(f'topology {name!r}: {chip.kind}s do not come in this number: use {nearest}')


def _require_compiler(topology: Topology) -> None:
  module, _, requirements = _COMPILERS[topology.chip.platform]
  if importlib.util.find_spec(module) is None:
    raise UserError(
      f'{topology.name} needs the compiler of {topology.chip.kind}s, {module}, which is not installed: '
      f'pip install -r {requirements}, in an environment of its own'
    )
