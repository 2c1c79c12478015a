"""The processes of one run: their start, their communication and their end.

The first process writes the run folder, the log and the console. The others write only their part of checkpoints. If
only one process finds a mistake, receives a signal or sees a file, it tells the others before any process acts on it.
So all processes do the same. A run with one process exchanges nothing.
"""

import contextlib
import functools
import ipaddress
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hbf.errors import UserError, first_line

T = TypeVar('T')

JOIN_SECONDS = 300  # the time that processes wait for each other at the start
LOST_SECONDS = 60  # the silence after which a process counts as lost, and the others end
LEAVE_SECONDS = 15  # the time that a process waits for the others at its end, before it counts as failed
LOST_STATUS = 75  # the exit status of a process that ends because another process is lost
UNMET_STATUS = 69  # the exit status of a process that ends because the processes did not meet

# Environment variables that launchers set, each with the variable that holds the number of tasks. '': there is none.
# A single task runs alone.
_SIGNS = {
  'SLURM_STEP_NODELIST': 'SLURM_NTASKS',
  'OMPI_COMM_WORLD_SIZE': 'OMPI_COMM_WORLD_SIZE',
  'JOB_COMPLETION_INDEX': '',  # an indexed job of Kubernetes
  'TPU_ML_PLATFORM': '',  # a Cloud TPU VM; JAX sets it when it is imported
}


def start(coordinator: str = '', processes: int | None = None, process: int | None = None) -> None:
  """Connect to the other processes of the run, if there are any. Call this before a device is used.

  Args:
    coordinator: HOST:PORT of process 0. '': JAX finds it in the environment (Slurm, Open MPI, Kubernetes, TPU pods).
    processes: the number of processes. 1: this process runs alone, whatever the environment says. None: JAX finds the
      number.
    process: the index of this process. None: JAX finds the index.

  Raises:
    UserError: an argument is missing or not valid, or JAX cannot find the values in the environment.
  """
  given = join_arguments(coordinator, processes, process)
  if processes == 1 or not (given or _in_cluster()):
    return
  # JAX's own handler would take SIGTERM from the run, and do nothing.
  jax.config.update('jax_enable_preemption_service', False)
  message = f'the processes of the run did not meet within {JOIN_SECONDS} s: {_advice(given)}'
  with _ended_after(JOIN_SECONDS, message, UNMET_STATUS):
    try:
      jax.distributed.initialize(
        **given,
        initialization_timeout=2 * JOIN_SECONDS,  # later than our own limit: JAX would abort the process
        heartbeat_timeout_seconds=LOST_SECONDS,
        shutdown_timeout_seconds=LEAVE_SECONDS,
      )
    except (RuntimeError, ValueError) as error:
      if 'coordinator_address should be defined' in str(error):  # JAX knows no such environment
        return
      raise UserError(
        f'JAX cannot tell the processes of this run from the environment ({first_line(error)}): give --coordinator, '
        '--processes and --process, or --processes=1 to run this one alone'
      ) from error
  # Gloo reports its connections on stdout, which belongs to the commands.
  if sys.stdout:
    sys.stdout.flush()
  sys.stdout = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)


def is_first() -> bool:
  """Return True in the first process. This call makes JAX initialize the devices."""
  return jax.process_index() == 0


@contextlib.contextmanager
def ended_by_loss() -> Iterator[None]:
  """End this process with a line of explanation if the code inside the context fails because another process ended.

  Only CPU devices notice at once that another process has ended, and raise an error. With other devices, JAX ends
  this process after LOST_SECONDS.
  """
  try:
    yield
  except UserError:  # it is a ValueError too, and may name a folder such as Gloomhaven
    raise
  except (jax.errors.JaxRuntimeError, ValueError) as error:  # a compiled call of JAX may raise a ValueError instead
    if 'Gloo' not in str(error):
      raise
    _end(
      f'another process of the run is gone ({first_line(error)}): start all again; a run goes on from its last '
      'checkpoint',
      LOST_STATUS,
    )


def exchange(value: Any) -> list[Any]:
  """Send a value to all processes. Return the values of all, in the order of the processes, once all have arrived.

  With several processes, the values are sent as JSON, so a tuple comes back as a list.
  """
  if jax.process_count() == 1:
    return [value]
  text = np.frombuffer(json.dumps(value).encode(), np.uint8)
  lengths = multihost_utils.process_allgather(np.int32(len(text)))
  room = -(-int(lengths.max()) // 1024) * 1024  # few sizes need few programs
  texts = multihost_utils.process_allgather(np.pad(text, (0, room - len(text))))
  return [json.loads(text[:length].tobytes()) for text, length in zip(texts, lengths, strict=True)]


@contextlib.contextmanager
def raise_everywhere() -> Iterator[None]:
  """Raise a UserError in all processes if the code inside the context raises it in any process.

  No process leaves the context before all processes have reached its end.
  """
  own = None
  try:
    yield
  except UserError as error:
    own = error
  messages = exchange(str(own) if own else '')
  if own:
    raise own
  for process, message in enumerate(messages):
    if message:
      raise UserError(f'process {process}: {message}')


def on_first_process(make: Callable[[], T]) -> T:
  """Call `make` in the first process only. Return its value in all processes. JSON must be able to hold the value.

  Raises:
    UserError: `make` raised this error.
  """
  value: Any = None
  with raise_everywhere():
    if is_first():
      value = make()
  return exchange(value)[0]


def check_same(values: dict[str, Any]) -> None:
  """Check that a dict is the same in all processes. JSON must be able to hold it.

  Raises:
    UserError: values differ. All processes raise this error, which names a key.
  """
  first, *others = exchange(values)
  for process, other in enumerate(others, 1):
    for key in sorted(first.keys() | other.keys()):
      if first.get(key) != other.get(key):
        raise UserError(
          f'{key} is {first.get(key)!r} in process 0, {other.get(key)!r} in process {process}: give all processes '
          'the same config, data and weights'
        )


def barrier(mesh: Mesh) -> None:
  """Wait for all processes, and then connect the devices of the mesh.

  CPU devices connect at the first use of a program, and wait for each other for only half a minute. But one process
  may compile longer than another. So call this function between the compilation and the first use.
  """
  if jax.process_count() > 1:
    exchange(None)
    jax.block_until_ready(_in_any(False, mesh))


def _in_any(here: bool, mesh: Mesh) -> jax.Array:
  """Return an array that is True if `here` is True in any process. All processes must call this function.

  It returns at once. The array is ready when all processes have called it.
  """
  each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
  spread = jax.make_array_from_callback((mesh.size,), each, lambda _: np.full(1, here))
  return _any(NamedSharding(mesh, PartitionSpec()))(spread)


@functools.cache
def _any(replicated: NamedSharding) -> Callable[[jax.Array], jax.Array]:
  return jax.jit(jnp.any, out_shardings=replicated)


class StopSignal:
  """A signal to stop. If any process receives it, all processes see it at the same call of this object.

  All processes must call this object equally often and at the same points in the code. A call starts an exchange
  between the processes. The next call returns its result, so that no process waits.
  """

  def __init__(self, here: Callable[[], bool], mesh: Mesh):
    """Store the mesh of all devices, and `here`: a function that returns True once this process has a signal."""
    self._here = here
    self._mesh = mesh
    self._asked: jax.Array | None = None
    self._answer = False

  def __call__(self) -> bool:
    """Return True if the run has to stop."""
    if jax.process_count() == 1:
      return self._here()
    if self._asked is not None:
      self._answer = self._answer or bool(self._asked)
    self._asked = _in_any(self._here(), self._mesh)
    return self._answer


def join_arguments(coordinator: str, processes: int | None, process: int | None) -> dict[str, Any]:
  """Check the arguments of `start`. Return the arguments of `jax.distributed.initialize` that say the same.

  Return {} if no argument is given, or only processes=1.

  Raises:
    UserError: an argument is missing or not valid.
  """
  missing = [name for name, value in _flags(coordinator, processes, process).items() if value in ('', None)]
  if len(missing) == 3 or (processes == 1 and len(missing) == 2):
    return {}
  if missing or processes is None or process is None:
    raise UserError(
      f'--{missing[0]} is missing: several processes need --coordinator=HOST:PORT, --processes=COUNT and '
      '--process=NUMBER, each process its own'
    )
  if not 0 <= process < processes:
    raise UserError(
      f'--process={process} is none of {processes} processes: give each its own number, from 0 to {processes - 1}'
    )
  host, _, port = coordinator.rpartition(':')
  if not host or not re.fullmatch(r'\d{1,5}', port) or not 0 < int(port) < 2**16:
    raise UserError(f'--coordinator={coordinator} is not HOST:PORT: give the host of process 0 and a free port there')
  if process == 0:
    _check_free(int(port))
  return {
    'coordinator_address': coordinator,
    'num_processes': processes,
    'process_id': process,
    'cluster_detection_method': 'deactivate',
  }


def _flags(coordinator: str, processes: int | None, process: int | None) -> dict[str, Any]:
  return {'coordinator': coordinator, 'processes': processes, 'process': process}


def free_port() -> int:
  """Return a port of this machine at which nothing listens."""
  with socket.create_server(('', 0)) as free:
    return int(free.getsockname()[1])


def reachable_host(coordinator: str) -> str:
  """Return the name or address by which the other processes reach this machine.

  It is the address of the network interface that leads to process 0. On the machine of process 0 itself, this may be
  a local address such as 127.0.0.1. Then the host of `coordinator` is returned.
  """
  host, _, port = coordinator.rpartition(':')
  try:
    family, kind, _, _, where = socket.getaddrinfo(host.strip('[]'), port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
      probe.connect(where)  # this sends nothing
      own = ipaddress.ip_address(probe.getsockname()[0])
  except (OSError, ValueError):
    return socket.gethostname()
  if own.is_loopback:
    return host
  return f'[{own}]' if own.version == 6 else str(own)


def _check_free(port: int) -> None:
  """Raise UserError if this process can't listen at the port."""
  try:  # otherwise JAX would end without a message
    socket.create_server(('', port)).close()
  except OSError as error:
    why = os.strerror(error.errno or 0)
    raise UserError(f'port {port} of --coordinator cannot be used here ({why}): choose another, for all') from None


def _in_cluster() -> bool:
  """Return True if a launcher may have started several processes."""
  return any(sign in os.environ and os.environ.get(count) != '1' for sign, count in _SIGNS.items())


def _advice(given: dict[str, Any]) -> str:
  if not given:
    return 'see which of them the launcher has started, and whether they reach each other'
  return (
    'process {process_id} of {num_processes} waits at {coordinator_address}; start each with its own --process, all '
    'with the same --processes and --coordinator, which they must reach'.format(**given)
  )


@contextlib.contextmanager
def _ended_after(seconds: float, message: str, status: int) -> Iterator[None]:
  """End this process with a message and an exit status if the code inside the context takes more than `seconds`."""
  timer = threading.Timer(seconds, _end, [message, status])
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


def _end(message: str, status: int) -> None:
  """End this process at once. A normal exit would wait for the other processes, and then abort."""
  print('error:', message, file=sys.stderr, flush=True)
  os._exit(status)
