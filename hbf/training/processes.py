"""Several processes that make one run: how they meet, agree and end.

The first process writes the workdir, the log and the console. The others compute, and write nothing but their part of
checkpoints. What only one of them knows (a file, a mistake, a signal) is told to all before any acts on it, so that
all do the same. With one process nothing here costs anything.
"""

import contextlib
import functools
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

from hbf.errors import UserError

T = TypeVar('T')

JOIN_SECONDS = 300  # that processes wait for each other when they start
LOST_SECONDS = 60  # after which a process that isn't heard of counts as lost, and the others end
LEAVE_SECONDS = 15  # that a process which ends waits for the others; if they don't, it has failed, and they end too

# What the launchers that JAX knows set, and where one says how many tasks there are; a single one stays alone.
_SIGNS = {
  'SLURM_STEP_NODELIST': 'SLURM_NTASKS',
  'OMPI_COMM_WORLD_SIZE': 'OMPI_COMM_WORLD_SIZE',
  'JOB_COMPLETION_INDEX': '',  # an indexed job of Kubernetes
  'TPU_ML_PLATFORM': '',  # a Cloud TPU VM; JAX sets it when it is imported
}


def start(coordinator: str = '', processes: int | None = None, process: int | None = None) -> None:
  """Meets the other processes of the run, if there are any; call it before a device is touched.

  Args:
    coordinator: HOST:PORT of process 0. Without it, JAX asks the environment (Slurm, Open MPI, Kubernetes, TPU pods).
    processes: how many there are; 1: none but this, whatever the environment says.
    process: the number of this one, from 0.

  Raises:
    UserError: one of them is missing or can't be, or the environment doesn't say enough.
  """
  given = _check(coordinator, processes, process)
  if processes == 1 or not (given or _in_cluster()):
    return
  # JAX's own handler of SIGTERM would hear it before a run does, and do nothing.
  jax.config.update('jax_enable_preemption_service', False)
  with _ended_after(JOIN_SECONDS, f'the processes of the run did not meet within {JOIN_SECONDS} s: {_who(given)}'):
    try:
      jax.distributed.initialize(
        **given,
        initialization_timeout=2 * JOIN_SECONDS,  # JAX would abort the process; the line above comes first
        heartbeat_timeout_seconds=LOST_SECONDS,
        shutdown_timeout_seconds=LEAVE_SECONDS,
      )
    except (RuntimeError, ValueError) as error:
      if 'coordinator_address should be defined' in str(error):  # nothing that JAX knows
        return
      raise UserError(
        f'JAX cannot tell the processes of this run from the environment ({_first_line(error)}): give --coordinator, '
        '--processes and --process, or --processes=1 to run this one alone'
      ) from error
  # Gloo reports its connections on stdout, which belongs to the scripts.
  sys.stdout.flush()
  sys.stdout = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)


def is_first() -> bool:
  """Whether this process is the one that writes; asking touches the devices."""
  return jax.process_index() == 0


@contextlib.contextmanager
def ended_by_loss() -> Iterator[None]:
  """Ends this process with a line if what is inside fails because another process is gone.

  Only CPUs notice at once, and raise; elsewhere JAX ends the process after LOST_SECONDS.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if 'Gloo' not in str(error):
      raise
    _end(
      f'another process of the run is gone ({_first_line(error)}): start all again; a run goes on from its last '
      'checkpoint'
    )


def exchange(value: Any) -> list[Any]:
  """What every process gave, as JSON passes it on, in the order of their numbers; each waits for all."""
  if jax.process_count() == 1:
    return [value]
  text = np.frombuffer(json.dumps(value).encode(), np.uint8)
  lengths = multihost_utils.process_allgather(np.int32(len(text)))
  room = -(-int(lengths.max()) // 1024) * 1024  # few sizes are few programs
  texts = multihost_utils.process_allgather(np.pad(text, (0, room - len(text))))
  return [json.loads(text[:length].tobytes()) for text, length in zip(texts, lengths, strict=True)]


@contextlib.contextmanager
def raise_everywhere() -> Iterator[None]:
  """A UserError inside is raised in all processes if it is in one; nobody goes on before all are through."""
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
  """What `make` gives in the first process, the only one that calls it; to the others as JSON passes it on.

  Raises:
    UserError: it was raised there.
  """
  value: Any = None
  with raise_everywhere():
    if is_first():
      value = make()
  return exchange(value)[0]


def check_same(values: dict[str, Any]) -> None:
  """Checks that a dict, fit for JSON, is the same in all processes.

  Raises:
    UserError: in all of them; the message names a key whose values differ.
  """
  first, *others = exchange(values)
  for process, other in enumerate(others, 1):
    for key in sorted(first.keys() | other.keys()):
      if first.get(key) != other.get(key):
        raise UserError(
          f'{key} is {first.get(key)!r} in process 0, {other.get(key)!r} in process {process}: give all processes '
          'the same config and data'
        )


def barrier(mesh: Mesh) -> None:
  """Waits for all processes, and then connects their devices, which form the mesh.

  Devices of CPUs that connect wait for each other for half a minute only, and one process may compile for longer than
  another: call it between a compilation and the first use.
  """
  if jax.process_count() > 1:
    exchange(None)
    jax.block_until_ready(_in_any(False, mesh))


def _in_any(here: bool, mesh: Mesh) -> jax.Array:
  """Whether `here` is true in any process; all of them ask, and none waits."""
  each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
  spread = jax.make_array_from_callback((mesh.size,), each, lambda _: np.full(1, here))
  return _any(NamedSharding(mesh, PartitionSpec()))(spread)


@functools.cache
def _any(replicated: NamedSharding) -> Callable[[jax.Array], jax.Array]:
  return jax.jit(jnp.any, out_shardings=replicated)


class StopSignal:
  """Whether a signal came, with the same answer in all processes: yes, once any of them has heard one.

  All ask equally often and at the same places. The devices pass on what each process knows when it asks, and the
  answer is that of the time before, so that nobody waits for it.
  """

  def __init__(self, here: Callable[[], bool], mesh: Mesh):
    """Of processes whose devices form the mesh; `here` says whether this one has heard a signal."""
    self._here = here
    self._mesh = mesh
    self._asked: jax.Array | None = None
    self._answer = False

  def __call__(self) -> bool:
    """Asks."""
    if jax.process_count() == 1:
      return self._here()
    if self._asked is not None:
      self._answer = self._answer or bool(self._asked)
    self._asked = _in_any(self._here(), self._mesh)
    return self._answer


def _check(coordinator: str, processes: int | None, process: int | None) -> dict[str, Any]:
  """What JAX is told of processes that were started by flags; {} if none was given."""
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


def _check_free(port: int) -> None:
  """Raises UserError if the port can't be listened at, of which JAX would die without a word."""
  try:
    socket.create_server(('', port)).close()
  except OSError as error:
    why = os.strerror(error.errno or 0)
    raise UserError(f'port {port} of --coordinator cannot be used here ({why}): choose another, for all') from None


def _in_cluster() -> bool:
  """Whether this may be one of several processes that a launcher has started."""
  return any(sign in os.environ and os.environ.get(count) != '1' for sign, count in _SIGNS.items())


def _who(given: dict[str, Any]) -> str:
  if not given:
    return 'see which of them the launcher has started, and whether they reach each other'
  return (
    'process {process_id} of {num_processes} waits at {coordinator_address}; start each with its own --process, all '
    'with the same --processes and --coordinator, which they must reach'.format(**given)
  )


@contextlib.contextmanager
def _ended_after(seconds: float, message: str) -> Iterator[None]:
  """Ends this process with a line if what is inside, which can't be interrupted, takes longer."""
  timer = threading.Timer(seconds, _end, [message])
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


def _end(message: str) -> None:
  """Ends this process at once: JAX's own end would wait for the others, and then abort."""
  print('error:', message, file=sys.stderr, flush=True)
  os._exit(1)


def _first_line(error: Exception) -> str:
  return (str(error).splitlines() or [''])[0][:150] or type(error).__name__
