"""Tests of signals while the main thread runs compiled code, where Python's own handlers wait."""

import os
import signal
import subprocess
import sys
import time

SCRIPT = """
import hashlib
from hbf.training.signals import signals
with signals() as heard:
  print('ready', flush=True)
  hashlib.pbkdf2_hmac('sha256', b'', b'', {iterations})
  print(heard(), flush=True)
"""


def started(iterations):
  command = [sys.executable, '-c', SCRIPT.format(iterations=iterations)]
  process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  assert process.stdout.readline() == 'ready\n'
  return process


def test_one_of_each_kind_is_heard_and_ends_nothing():
  process = started(10**6)
  process.send_signal(signal.SIGINT)
  process.send_signal(signal.SIGTERM)
  assert (*process.communicate(), process.returncode) == ('True\n', '', 0)


def test_the_second_of_a_kind_ends_the_process_at_once():
  process = started(2**31 - 1)
  while process.poll() is None:
    process.send_signal(signal.SIGINT)
    time.sleep(0.02)
  assert (*process.communicate(), process.returncode) == ('', 'error: ended by a second SIGINT\n', 130)


IN_TERMINAL = """
import pathlib, signal, sys, time
from hbf.training.signals import signals
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run after nohup
with signals() as heard:
  print('ready', flush=True)
  while not heard():
    time.sleep(0.01)
  for _ in range(100):  # the shell may send the signal again
    print('still here', flush=True)
    print('still here', file=sys.stderr, flush=True)
    time.sleep(0.001)
  pathlib.Path(sys.argv[1]).write_text('saved')
"""


def test_a_closed_terminal_is_heard_like_another_signal(tmp_path):
  """The process has a terminal, which closes. What it still prints goes nowhere, and it ends in its own time."""
  terminal, outputs = os.openpty()
  command = [sys.executable, '-c', IN_TERMINAL, str(tmp_path / 'file')]
  process = subprocess.Popen(command, stdout=outputs, stderr=outputs)
  os.close(outputs)
  shown = b''
  while not shown.endswith(b'\n'):
    shown += os.read(terminal, 100)
  process.send_signal(signal.SIGHUP)
  os.close(terminal)
  assert process.wait() == 0
  assert (tmp_path / 'file').read_text() == 'saved'


def test_a_process_that_ignores_a_closed_terminal_goes_on():
  """The command `nohup` starts such a process."""
  script = 'import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)' + SCRIPT.format(iterations=10**6)
  process = subprocess.Popen([sys.executable, '-c', script], stdout=subprocess.PIPE, text=True)
  assert process.stdout.readline() == 'ready\n'
  process.send_signal(signal.SIGHUP)
  assert (process.communicate()[0], process.returncode) == ('False\n', 0)
