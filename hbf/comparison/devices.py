"""Devices for the runs of a comparison. Each device has one run at a time."""

import dataclasses
import os
import re

from hbf.errors import UserError

# Variables that list the GPUs a process may use, by number or name (GPU-…, MIG-…). AMD's runtimes read the first too.
ALLOTMENTS = ('CUDA_VISIBLE_DEVICES', 'HIP_VISIBLE_DEVICES', 'ROCR_VISIBLE_DEVICES')


@dataclasses.dataclass(frozen=True)
class Device:
  """A GPU, a CPU core, or all devices that JAX finds, for one run at a time.

  Attributes:
    kind: 'gpu', 'cpu', or '' for all devices that JAX finds.
    number: index of the GPU or of the core. It has no meaning for ''.
  """

  kind: str = ''
  number: int = 0

  def __str__(self) -> str:
    return f'{self.kind}:{self.number}' if self.kind else 'all devices'

  def environment(self) -> dict[str, str]:
    """Return the environment variables that restrict JAX to this GPU, or to the CPU. {} for all devices.

    gpu:0 is the first GPU that the current environment allows. No variable selects a core of the CPU:
    `hbf.comparison.runs` binds the process of a run to its core.

    Raises:
      UserError: the current environment allows too few GPUs.
    """
    if self.kind != 'gpu':
      return {'JAX_PLATFORMS': 'cpu'} if self.kind else {}
    # Set one variable only. If several are set, a later one counts only the GPUs that the earlier ones allow.
    name = next((name for name in ALLOTMENTS if name in os.environ), ALLOTMENTS[0])
    if name not in os.environ:
      return {name: str(self.number)}
    allotted = [entry.strip() for entry in os.environ[name].split(',') if entry.strip()]
    if self.number >= len(allotted):
      raise UserError(
        f'{self} is not there: {name}={os.environ[name]} allots {len(allotted)} GPUs. Their numbers begin at gpu:0'
      )
    return {name: allotted[self.number]}


def parse_devices(text: str) -> tuple[Device, ...]:
  """Parse a list of devices such as 'gpu:0,gpu:1', or of CPU cores such as 'cpu:0,cpu:1'.

  '' gives a single `Device`, which stands for all devices that JAX finds.

  Raises:
    UserError: the form is wrong, a device is given twice, or this process may not use one of the devices.
  """
  devices = []
  for part in filter(None, text.split(',')):
    match = re.fullmatch(r'(gpu|cpu):(\d+)', part.strip())
    if not match:
      raise UserError(f"device {part!r} is not like gpu:0 or cpu:0: expected a list such as 'gpu:0,gpu:1'")
    devices.append(Device(match[1], int(match[2])))
  if len(set(devices)) < len(devices):
    raise UserError(f'--devices={text} names a device twice: give each device once')
  cores = os.sched_getaffinity(0) if hasattr(os, 'sched_getaffinity') else set()
  if missing := [device for device in devices if device.kind == 'cpu' and device.number not in cores]:
    raise UserError(
      f'{missing[0]} is not a core that this process may use: it may use {", ".join(map(str, sorted(cores)))}'
    )
  for device in devices:
    device.environment()  # raises UserError if the device is not allotted
  return tuple(devices) or (Device(),)
