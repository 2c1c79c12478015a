"""Tests of several processes that make one run."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from toy_runs import QUIET, params_of, save_untrained

from hbf.errors import UserError
from hbf.training import processes
from hbf.training.loop import train
from hbf.training.restore import restore
from hbf.training.writers import read_metrics

ROOT = pathlib.Path(__file__).parents[2]
FOUR = {'XLA_FLAGS': os.environ['XLA_FLAGS'].replace('device_count=8', 'device_count=4')}
EIGHT = jax.devices()[:8]
# Differences in the order of sums, after an epoch.
TOLERANCE = 1e-6

# What every process does in `talk`: all that they say to each other, without a run.
TALK = """
import contextlib, json, pathlib, sys
import numpy as np
from hbf.training import processes

coordinator, process, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
processes.start(coordinator, 2, process)

import jax
import jax.numpy as jnp
from hbf.errors import UserError
from hbf.training.checkpoints import Checkpoints
from hbf.training.sharding import batch_sharding, make_mesh, replicated
from hbf.training.state import Totals, TrainState


def refused(function, *arguments):
  try:
    function(*arguments)
  except UserError as error:
    return str(error)


def in_second():
  with processes.raise_everywhere():
    if process == 1:
      raise UserError('no data here')


def state(value):
  new = TrainState(jnp.asarray(value), {'w': jnp.full(8, float(value))}, (), Totals.zeros())
  shardings = jax.tree.map(lambda _: replicated(mesh), new)
  shardings = shardings.replace(params={'w': batch_sharding(mesh)})  # an eighth on each device
  return jax.jit(lambda: new, out_shardings=shardings)()


def unreadable(step, items):
  if step == 2 and process == 1:
    raise ValueError('damaged for one')
  return read(step, items)


mesh = make_mesh(jax.devices())
times = []
heard = processes.StopSignal(lambda: process == 1 and len(times) >= 2, mesh)
for _ in range(5):
  times.append(heard())
with contextlib.closing(Checkpoints(folder, keep=2)) as checkpoints:
  for step in (1, 2):
    checkpoints.save(step, state(step), {'seconds': 1.0})
with contextlib.closing(Checkpoints(folder, keep=2)) as checkpoints:
  read, checkpoints._read = checkpoints._read, unreadable
  found = checkpoints.restore_newest(state(0))
said = {
  'processes': jax.process_count(),
  'exchange': processes.exchange('x' * 1500 * process),
  'on_first': processes.on_first_process(lambda: ['of', process]),
  'refused': [
    refused(processes.on_first_process, lambda: {}['x'] if process else exec('raise UserError("in use")', globals())),
    refused(in_second),
    refused(processes.check_same, {'train.epochs': process, 'seed': 0}),
  ],
  'heard': times,
  'restored': [found.step, [one.data.item() for one in found.state.params['w'].addressable_shards], *found.damaged],
  'about': found.about,
}
print(json.dumps(said))
"""


# What every process does in `taught`: it reads weights for a run, and claims the folder of the run.
TAUGHT = """
import json, pathlib, sys, time
from hbf.training import processes

coordinator, process, folder, *flags = sys.argv[1:]
folder, process = pathlib.Path(folder), int(process)
processes.start(coordinator, 2, process)

import numpy as np
from hbf.config.command_line import read_config
from hbf.data.datasets import from_arrays
from hbf.data.images.arrays import ArrayData
from hbf.errors import UserError
from hbf.training import startup
from hbf.training.evaluate import evaluate_workdir
from hbf.training.experiment import prepare

ONE, OTHER, NONE = (str(folder / name) for name in ('one', 'other', 'none'))


def prepared(teacher, initial=''):
  taught = f'--config.train.teacher={teacher}', '--config.train.teacher_weight=0.5', f'--config.init_from={initial}'
  try:
    return prepare(read_config([*flags, *taught]))
  except UserError as error:
    return str(error).replace(str(folder), 'FOLDER')


def slow(workdir):
  time.sleep(0.5)
  return locked(workdir)


locked, startup.locked = startup.locked, slow
said = [prepared([ONE, NONE][process]), prepared([ONE, OTHER][process]), prepared(ONE, [ONE, OTHER][process])]
experiment = prepared(ONE, ONE)
with startup.claimed(folder / 'run', experiment, {'name': 'digits'}):
  processes.exchange(None)
  said.append(sorted(path.name for path in (folder / 'run').iterdir()))
said.append(float(np.sum(experiment.initial.params['head']['kernel'])))
gray, labels = np.zeros((2, 8, 8, 1), np.uint8), np.arange(2)
other = from_arrays(ArrayData(gray, labels, gray, labels))
try:
  evaluate_workdir(folder / 'one', 'latest', 'test', dataset=[None, other][process])
except UserError as error:
  said.append(str(error))
print(json.dumps(said))
"""


# Runs a command of a process, and notes its number, what it says and its status.
NOTED = """
process=$1
shift
"$@" 2> {0}/$process &
echo $! > {0}/$process.pid
wait $!
echo $? > {0}/$process.status
"""


@pytest.fixture(scope='module')
def talk(tmp_path_factory):
  """Return what two connected processes print, by process."""
  folder = tmp_path_factory.mktemp('talk')
  (folder / 'checkpoints').mkdir()
  said = said_by_two(TALK, folder / 'checkpoints')
  assert sorted(path.name for path in (folder / 'checkpoints').iterdir()) == ['1', '2.damaged']
  return said


def said_by_two(script, *arguments):
  """Return what two connected processes print as JSON, by process."""
  coordinator = f'localhost:{processes.free_port()}'
  started = [
    subprocess.Popen(
      [sys.executable, '-c', script, coordinator, str(process), *arguments],
      cwd=ROOT,
      env=os.environ | FOUR,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for process in range(2)
  ]
  ended = [process.communicate(timeout=120) for process in started]
  assert [process.returncode for process in started] == [0, 0], ended
  return [json.loads(out) for out, _ in ended]  # nothing else is on stdout


def test_processes_tell_each_other_what_they_know(talk):
  for said in talk:
    assert (said['processes'], said['exchange'], said['on_first']) == (2, ['', 'x' * 1500], ['of', 0])


def test_what_one_finds_wrong_ends_all(talk):
  config = 'train.epochs is 0 in process 0, 1 in process 1: give all processes the same config, data and weights'
  assert talk[0]['refused'] == ['in use', 'process 1: no data here', config]
  assert talk[1]['refused'] == ['process 0: in use', 'no data here', config]


def test_a_signal_that_one_hears_is_all_of_theirs_at_the_same_time(talk):
  assert [said['heard'] for said in talk] == [[False, False, False, True, True]] * 2


def test_a_checkpoint_that_one_cannot_read_is_set_aside_by_all(talk):
  assert [said['restored'] for said in talk] == [[1, [1.0] * 4, 2]] * 2
  assert [said['about'] for said in talk] == [{'seconds': 1.0}] * 2


@pytest.mark.slow
def test_weights_of_this_package_are_read_and_compared_by_all(tmp_path, toy, digits_dir):
  """Both processes read weights. They find out if one has none or others. The first one alone claims the folder.

  If one has other data than those of the run that they evaluate, both hear of it.
  """
  for seed, name in enumerate(('one', 'other')):
    save_untrained(toy('model=vit', **TOY), tmp_path / name, scale=0.3, seed=seed)
  flags = [f'--config.{key}={value}' for key, value in (TOY | {'data.dir': digits_dir}).items()]
  said = said_by_two(TAUGHT, tmp_path, '--config=configs/digits.py:model=vit', *flags)
  missing = 'train.teacher=FOLDER/none holds no weights'
  assert said[0][0].startswith(f'process 1: {missing}') and said[1][0].startswith(missing)
  for found in said:
    assert re.match(r'the checksum of the weights of train.teacher is .* in process 0, .* in process 1', found[1])
    assert re.match(r'the checksum of the weights of init_from is .* in process 0, .* in process 1', found[2])
    assert found[3] == ['.lock', 'config.json', 'data.json', 'teacher.json']
    assert found[4] == pytest.approx(float(params_of(tmp_path / 'one')['head']['kernel'].sum()))
  assert said[0][5] == f'process 1: {said[1][5]}' and 'was trained on other data' in said[1][5]


@pytest.fixture
def launch(tmp_path):
  """Return a function that starts the processes of docs/how-to/devices.md. It writes their output and statuses."""
  shells = []

  def start(workdir, flags='', count=2, **changes):
    page = (ROOT / 'docs' / 'how-to' / 'devices.md').read_text()
    lines = re.search(r'Two processes on one machine.*?```sh\n(.*?)```', page, re.DOTALL)[1]
    config = ' '.join(f"'--config.{key}={value}'" for key, value in changes.items())
    command = f'bash {tmp_path}/noted.sh $process {sys.executable} -m hbf'
    for old, new in (
      ('in 0 1;', f'in {" ".join(map(str, range(count)))};'),
      ('--processes=2', f'--processes={count}'),
      ('9876', str(processes.free_port())),
      ('hbf', command),
      ('--workdir=runs/two', f'--config=configs/digits.py:model=vit --workdir={workdir} {flags} {config}'),
    ):
      assert lines.count(old) == 1
      lines = lines.replace(old, new)
    (tmp_path / 'noted.sh').write_text(NOTED.format(tmp_path))
    shells.append(subprocess.Popen(['bash', '-c', lines], cwd=ROOT, start_new_session=True))
    return shells[-1]

  yield start
  for shell in shells:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(shell.pid, signal.SIGKILL)


def when_reported(workdir, shell):
  """Wait until a run has logged a line. Return the process ids of its processes."""
  while not read_metrics(workdir):
    assert shell.poll() is None
    time.sleep(0.02)
  return _numbers(workdir.parent, '*.pid')


def statuses(folder):
  """Return the exit statuses of the processes."""
  return _numbers(folder, '*.status')


def _numbers(folder, pattern):
  return [int(path.read_text()) for path in sorted(folder.glob(pattern))]


# Every parameter is shared by both processes.
TOY = {
  'mesh.data': 1,
  'mesh.fsdp': 4,
  'mesh.tensor': 2,
  'model.width': 16,
  'model.depth': 1,
  'model.heads': 2,
  'model.stage2.hidden': 12,
  'train.epochs': 1.0,
  'train.steps_per_call': 1,
  'data.validation': 0.0,
  'evaluate.every': '1epoch',
  'log.every': '2steps',
  'log.units': False,
  'checkpoint.every': '1steps',
  'checkpoint.keep': 99,
}


@pytest.mark.slow
def test_two_processes_are_one_run_that_any_of_them_stops_and_one_goes_on(tmp_path, toy, digits_dir, launch):
  """A signal to one process stops both, and saves the run. A single process with 8 devices then continues the run."""
  workdir, whole = tmp_path / 'two', tmp_path / 'one'
  shell = launch(workdir, **TOY, **{'data.dir': digits_dir})
  second = when_reported(workdir, shell)[1]
  os.kill(second, signal.SIGTERM)
  shell.wait(120)
  assert statuses(tmp_path) == [0, 0]
  assert 'saved; the same command goes on' in (tmp_path / '0').read_text()
  assert not re.search(r'^step', (tmp_path / '1').read_text(), re.MULTILINE)  # only the first process reports

  config = toy('model=vit', **TOY)
  expected = train(config, whole, QUIET, EIGHT)
  stopped = restore(workdir, 'latest', EIGHT).step
  assert 2 <= stopped < expected['steps'] and not (workdir / 'result.json').exists()
  assert_close(workdir, whole, stopped)
  result = train(config, workdir, QUIET, EIGHT)
  assert [result[key] for key in ('steps', 'device')] == [expected[key] for key in ('steps', 'device')]
  assert_close(workdir, whole, expected['steps'])
  losses, whole_losses = ([line['loss'] for line in read_metrics(path)[:-1]] for path in (workdir, whole))
  assert losses == pytest.approx(whole_losses, rel=1e-5)


def assert_close(first, second, step):
  one, other = (jax.tree.map(np.asarray, restore(path, str(step), EIGHT[:1]).params) for path in (first, second))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=TOLERANCE), one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('number', 'index', 'seconds'),
  [
    (signal.SIGKILL, 0, 20),
    (signal.SIGKILL, 1, processes.LOST_SECONDS),  # process 0 may learn of it only from JAX's service, its own
    (signal.SIGSTOP, 0, processes.LOST_SECONDS + 15),
    (signal.SIGSTOP, 1, processes.LOST_SECONDS + 15),
  ],
)
def test_the_other_of_a_process_that_dies_or_hangs_ends_with_an_error(
  tmp_path, digits_dir, launch, number, seconds, index
):
  shell = launch(tmp_path / 'two', **TOY | {'train.epochs': 1000.0, 'data.dir': digits_dir})
  numbers = when_reported(tmp_path / 'two', shell)
  os.kill(numbers[index], number)
  begin = time.monotonic()
  while is_running(numbers[1 - index]):
    assert time.monotonic() < begin + seconds
    time.sleep(0.1)
  with contextlib.suppress(ProcessLookupError):
    os.kill(numbers[index], signal.SIGKILL)
  shell.wait(20)
  assert statuses(tmp_path)[1 - index] in (processes.LOST_STATUS, 128 + signal.SIGABRT)
  said = (tmp_path / str(1 - index)).read_text()
  assert 'another process of the run is gone' in said or 'another task died' in said


@pytest.mark.parametrize('kind', [jax.errors.JaxRuntimeError, ValueError])
def test_a_loss_has_a_status_of_its_own_and_other_errors_pass(monkeypatch, kind):
  ended = []
  monkeypatch.setattr(processes, '_end', lambda message, status: ended.append(status))
  with processes.ended_by_loss():
    raise kind('UNKNOWN: Gloo AllGather failed: Connection closed by peer')
  with pytest.raises(kind, match='no room'), processes.ended_by_loss():
    raise kind('no room')
  with pytest.raises(UserError, match='Gloomhaven'), processes.ended_by_loss():
    raise UserError('Gloomhaven exists and is not a run')
  assert ended == [processes.LOST_STATUS]


@pytest.mark.slow
@pytest.mark.parametrize(('count', 'index'), [(2, 0), (2, 1), (3, 0), (3, 1)])
def test_an_elastic_run_that_loses_a_process_goes_on_with_the_others(tmp_path, digits_dir, launch, count, index):
  """Process 0 has the coordinator and the lock of the run folder. Its child must end with the killed supervisor."""
  workdir = tmp_path / 'two'
  any_devices = {'mesh.data': -1, 'mesh.fsdp': 1, 'mesh.tensor': 1}
  changes = any_devices | {'train.epochs': 3.0, 'train.batch_size': 48, 'data.dir': digits_dir}
  shell = launch(workdir, '--elastic', count, **TOY | changes)
  os.kill(when_reported(workdir, shell)[index], signal.SIGKILL)
  shell.wait(600)
  others = [process for process in range(count) if process != index]
  expected = dict.fromkeys(others, 0) | {index: 128 + signal.SIGKILL}
  assert dict(enumerate(statuses(tmp_path))) == expected
  said = (tmp_path / str(others[0])).read_text()
  assert f'processes left: {count - 1} of {count}' in said and 'goes on after step' in said
  reports = [line['step'] for line in read_metrics(workdir) if line['split'] == 'train']
  assert reports == [*range(2, reports[-1], 2), reports[-1]]
  assert (workdir / 'result.json').exists()


def is_running(number):
  try:
    return pathlib.Path(f'/proc/{number}/stat').read_text().split()[2] != 'Z'
  except FileNotFoundError:
    return False


@pytest.mark.parametrize(
  ('given', 'message'),
  [
    (('localhost:9876', 2, None), r'--process is missing: several processes need --coordinator=HOST:PORT'),
    (('', 2, 1), r'--coordinator is missing'),
    (('', None, 0), r'--coordinator is missing'),
    (('localhost:9876', 2, 2), r'--process=2 is none of 2 processes: give each its own number, from 0 to 1'),
    (('localhost', 2, 1), r'--coordinator=localhost is not HOST:PORT'),
    (('localhost:70000', 2, 0), r'--coordinator=localhost:70000 is not HOST:PORT'),
  ],
)
def test_flags_that_make_no_run_are_named(given, message):
  with pytest.raises(UserError, match=message):
    processes.start(*given)


def test_a_port_that_is_taken_is_named():
  with socket.socket() as taken:
    taken.bind(('', 0))
    taken.listen()
    port = taken.getsockname()[1]
    with pytest.raises(UserError, match=rf'port {port} of --coordinator .* \(Address already in use\)'):
      processes.start(f'localhost:{port}', 2, 0)


@pytest.mark.parametrize('environment', [{}, {'SLURM_STEP_NODELIST': 'node[1-2]', 'SLURM_NTASKS': '1'}])
def test_a_process_without_others_stays_as_it_is(monkeypatch, environment):
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  monkeypatch.setattr(jax.distributed, 'initialize', None)
  processes.start()
  processes.start(processes=1)


def test_processes_that_do_not_come_are_not_waited_for_for_ever():
  script = 'from hbf.training import processes as p; p.JOIN_SECONDS = 1; p.start({!r}, 2, 1)'
  done = subprocess.run(
    [sys.executable, '-c', script.format(f'localhost:{processes.free_port()}')],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == processes.UNMET_STATUS
  assert re.search(r'^error: the processes of the run did not meet within 1 s: process 1 of 2 waits', done.stderr)
