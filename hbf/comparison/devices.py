"""Devices of a comparison: what one run at a time is given."""

import dataclasses
import os
import re

from hbf.errors import UserError

# What says which GPUs a process may use, by number or name (GPU-…, MIG-…); AMD's runtimes know the first, too.
ALLOTMENTS = ('CUDA_VISIBLE_DEVICES', 'HIP_VISIBLE_DEVICES', 'ROCR_VISIBLE_DEVICES')


@dataclasses.dataclass(frozen=True)
class Device:
  """A `kind` (gpu, cpu) and the number of one of these; kind '' is whatever JAX finds."""

  kind: str = ''
  number: int = 0

  def __str__(self) -> str:
    return f'{self.kind}:{self.number}' if self.kind else 'all devices'

  def environment(self) -> dict[str, str]:
    """Variables under which JAX sees this device alone; gpu:0 is the first GPU that the environment allots.

    Raises:
      UserError: it doesn't allot so many.
    """
    if self.kind != 'gpu':
      return {'JAX_PLATFORMS': 'cpu'} if self.kind else {}
    # Of the variables one only: where several are set, the later count what the earlier leave.
    name = next((name for name in ALLOTMENTS if name in os.environ), ALLOTMENTS[0])
    if name not in os.environ:
      return {name: str(self.number)}
    allotted = [entry.strip() for entry in os.environ[name].split(',') if entry.strip()]
    if self.number >= len(allotted):
      raise UserError(
        f'{self} is not there: {name}={os.environ[name]} allots {len(allotted)} GPUs, which count from gpu:0'
      )
    return {name: allotted[self.number]}


def parse_devices(text: str) -> tuple[Device, ...]:
  """Devices from 'gpu:0,gpu:1' or 'cpu:0,cpu:1' (a core each); all of them for one run at a time from ''.

  Raises:
    UserError: not of this form, one twice, or a core or GPU that isn't allotted.
  """
  devices = []
  for part in filter(None, text.split(',')):
    match = re.fullmatch(r'(gpu|cpu):(\d+)', part.strip())
    if not match:
      raise UserError(f"device {part!r} is not like gpu:0 or cpu:0; expected a list such as 'gpu:0,gpu:1'")
    devices.append(Device(match[1], int(match[2])))
  if len(set(devices)) < len(devices):
    raise UserError(f'--devices={text} names a device twice')
  cores = os.sched_getaffinity(0) if hasattr(os, 'sched_getaffinity') else set()
  if missing := [device for device in devices if device.kind == 'cpu' and device.number not in cores]:
    raise UserError(
      f'{missing[0]} is not a core this process may use: those are {", ".join(map(str, sorted(cores)))}'
    )
  for device in devices:
    device.environment()  # raises if it isn't there
  return tuple(devices) or (Device(),)
