"""Tests of signals while the main thread runs compiled code, where Python's own handlers wait."""

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
