"""Devices for the runs of a comparison."""

import collections
import contextlib
import dataclasses
import fcntl
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from hbf.errors import UserError

# Variables that list the GPUs a process may use, by number or name (GPU-…, MIG-…). AMD's runtimes read the first too.
ALLOTMENTS = ('CUDA_VISIBLE_DEVICES', 'HIP_VISIBLE_DEVICES', 'ROCR_VISIBLE_DEVICES')
# A process of JAX reserves three quarters of a GPU's memory, unless this variable is false.
RESERVE = 'XLA_PYTHON_CLIENT_PREALLOCATE'


@dataclasses.dataclass(frozen=True)
class Device:
  """A GPU, a CPU core, or all devices that JAX finds, for a run.

  Attributes:
    kind: 'gpu', 'cpu', or '' for all devices that JAX finds.
    number: index of the GPU or of the core. It has no meaning for ''.
    shared: True if several runs use this GPU at a time.
  """

  kind: str = ''
  number: int = 0
  shared: bool = False

  def __str__(self) -> str:
    return f'{self.kind}:{self.number}' if self.kind else 'all devices'

  def environment(self) -> dict[str, str]:
    """Return the environment variables that restrict JAX to this GPU, or to the CPU. {} for all devices.

    If several runs share the GPU, none reserves memory, unless the current environment says otherwise. gpu:0 is the
    first GPU that this environment allows. No variable selects a core of the CPU: `hbf.comparison.runs` binds the
    process of a run to its core.

    Raises:
      UserError: the current environment allows too few GPUs.
    """
    if self.kind != 'gpu':
      return {'JAX_PLATFORMS': 'cpu'} if self.kind else {}
    memory = {RESERVE: 'false'} if self.shared and RESERVE not in os.environ else {}
    # Set one variable only. If several are set, a later one counts only the GPUs that the earlier ones allow.
    name = next((name for name in ALLOTMENTS if name in os.environ), ALLOTMENTS[0])
    if name not in os.environ:
      return {name: str(self.number)} | memory
    allotted = [entry.strip() for entry in os.environ[name].split(',') if entry.strip()]
    if self.number >= len(allotted):
      raise UserError(
        f'{self} is not there: {name}={os.environ[name]} allots {len(allotted)} GPUs. Their numbers begin at gpu:0'
      )
    return {name: allotted[self.number]} | memory


def parse_devices(text: str) -> tuple[Device, ...]:
  """Parse a list of devices such as 'gpu:0,gpu:1', or of CPU cores such as 'cpu:0,cpu:1'.

  A GPU that is given n times has n runs at a time. '' gives a single `Device`, which stands for all devices that JAX
  finds.

  Raises:
    UserError: the form is wrong, a core is given twice, or this process may not or cannot use one of the devices.
  """
  devices = []
  for part in filter(None, text.split(',')):
    match = re.fullmatch(r'(gpu|cpu):(\d+)', part.strip())
    if not match:
      raise UserError(f"device {part!r} is not like gpu:0 or cpu:0: expected a list such as 'gpu:0,gpu:1'")
    devices.append(Device(match[1], int(match[2])))
  counts = collections.Counter(devices)
  if any(device.kind == 'cpu' and count > 1 for device, count in counts.items()):
    raise UserError(f'--devices={text} names a core twice: give each core once')
  cores = os.sched_getaffinity(0) if hasattr(os, 'sched_getaffinity') else set()
  if missing := [device for device in devices if device.kind == 'cpu' and device.number not in cores]:
    raise UserError(
      f'{missing[0]} is not a core that this process may use: it may use {", ".join(map(str, sorted(cores)))}'
    )
  for device in devices:
    device.environment()  # raises UserError if the device is not allotted
  _check_gpus([device for device in devices if device.kind == 'gpu'])
  return tuple(dataclasses.replace(device, shared=counts[device] > 1) for device in devices) or (Device(),)


def count_gpus() -> tuple[int, str]:
  """Count the GPUs that JAX finds. A process of its own counts them, because this one leaves them to the runs.

  Returns:
    The number of GPUs. If there is none, also the last line of JAX's error, else ''.
  """
  program = "import jax; print(len(jax.local_devices(backend='gpu')))"
  counted = subprocess.run(
    [sys.executable, '-c', program], env=os.environ | {RESERVE: 'false'}, capture_output=True, text=True, check=False
  )
  if counted.returncode == 0:
    return int(counted.stdout.split()[-1]), ''
  return 0, (counted.stderr.strip().splitlines() or [f'exit status {counted.returncode}'])[-1]


def _check_gpus(devices: Sequence[Device]) -> None:
  """Raise UserError if JAX does not find one of the GPUs.

  Without this check, a run would train on the CPU instead.
  """
  if not devices:
    return
  found, error = count_gpus()
  if missing := [device for device in devices if device.number >= found]:
    names = ', '.join(f'gpu:{number}' for number in range(found))
    what = f'JAX finds only {names}' if found else f'JAX finds no GPU ({error})'
    raise UserError(f'{missing[0]} is not there: {what}. Give other --devices, or install JAX for this GPU')


def lock_core(core: int) -> tuple[bool, tuple[int, ...]]:
  """Try to lock a core of the CPU for a run.

  Returns:
    True if a run of another process has the lock, and the file descriptors that hold the lock. There are none if the
    lock is not available. The core stays locked until all copies of the descriptors are closed.
  """
  path = pathlib.Path(tempfile.gettempdir(), f'hbf-core-{core}.lock')
  with contextlib.suppress(OSError):
    path.touch()
  try:
    descriptor = os.open(path, os.O_RDONLY)
  except OSError:
    return False, ()
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as error:
    os.close(descriptor)
    return isinstance(error, BlockingIOError), ()
  return False, (descriptor,)
