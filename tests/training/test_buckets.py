"""Runs on s3:// with a server of moto on the loopback address: `make test-buckets`."""

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from PIL import Image
from toy_runs import ONE, QUIET, assert_same_run, stop_at

import hbf
from benchmarks.chaos import ROOT, RUN, outcome
from hbf.errors import UserError
from hbf.training import bucket as buckets
from hbf.training import mirror
from hbf.training.bucket import Bucket
from hbf.training.loop import train
from hbf.training.mirror import local_copy, mirrored

KILLS = 10
# `hbf` in a process of its own, in which a lock without a sign of life counts as left behind after three seconds.
HBF = 'import sys, hbf.__main__ as hbf, hbf.training.bucket as b; b.BEAT, b.SILENCE = 0.5, 3.0; sys.exit(hbf.main())'


@pytest.fixture(scope='module', autouse=True)
def server():
  """Start the server, with a bucket `runs`."""
  moto, boto3 = pytest.importorskip('moto.server'), pytest.importorskip('boto3')
  pytest.importorskip('s3fs')
  started = moto.ThreadedMotoServer('127.0.0.1', 0, verbose=False)
  started.start()
  host, port = started.get_host_and_port()
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('AWS_ENDPOINT_URL', f'http://{host}:{port}')
    for name, value in {'ACCESS_KEY_ID': 'a', 'SECRET_ACCESS_KEY': 'b', 'DEFAULT_REGION': 'us-east-1'}.items():
      patch.setenv(f'AWS_{name}', value)
    boto3.client('s3').create_bucket(Bucket='runs')
    yield
  started.stop()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  """Give each test a place of its own for local files."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  return tmp_path / 'cache' / 'hbf' / 'buckets'


def test_one_of_several_that_create_an_object_succeeds():
  created = []

  def create(number):
    created.append(Bucket('s3://runs/race').create('object', str(number).encode()))

  threads = [threading.Thread(target=create, args=[number]) for number in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sorted(created) == [False] * 7 + [True]


def test_objects_are_listed_read_and_removed(tmp_path):
  bucket, path = Bucket('s3://runs/objects'), tmp_path / 'a file [1].bin'
  assert bucket.is_empty() and bucket.names() == [] and bucket.read('x') is None
  path.write_bytes(bytes(range(256)) * 50_000)
  bucket.upload({'files/1/a file [1].bin': path, 'files/2/b': path})
  assert bucket.names('files') == ['files/1/a file [1].bin', 'files/2/b'] and not bucket.is_empty()
  bucket.download({'files/1/a file [1].bin': tmp_path / 'copy'})
  assert (tmp_path / 'copy').read_bytes() == path.read_bytes()
  with pytest.raises(FileNotFoundError):
    bucket.download({'files/3': tmp_path / 'copy'})
  bucket.remove(['files/2/b', 'files/3'])
  assert bucket.names() == ['files/1/a file [1].bin']


def test_what_cannot_be_used_is_refused_in_a_line(monkeypatch):
  with pytest.raises(UserError, match=r's3://absent/run cannot be used \(The specified bucket does not exist\)'):
    Bucket('s3://absent/run').create('x', b'')
  with pytest.raises(UserError, match='s3://absent/run holds no run'):
    local_copy('s3://absent/run')
  monkeypatch.setenv('AWS_ENDPOINT_URL', 'http://127.0.0.1:9')
  with pytest.raises(UserError, match=r's3://runs/x cannot be reached \(EndpointConnectionError: .*\)'):
    Bucket('s3://runs/x').names()


def test_a_stopped_run_goes_on_elsewhere_bit_for_bit_and_is_read_from_the_bucket(
  toy, tmp_path, cache, monkeypatch, capsys
):
  config = toy(**{'model.dropout': 0.1, 'train.average': 0.9, 'train.epochs': 2.0, 'checkpoint.every': '3steps'})
  whole, address = train(config, tmp_path / 'whole', QUIET, ONE), 's3://runs/stopped'
  with monkeypatch.context() as patch, mirrored(address, QUIET) as folder:
    stop_at(patch, whole['steps'] // 2)
    assert train(config, folder, QUIET, ONE) is None
  shutil.rmtree(cache)
  with (
    pytest.raises(UserError, match=f'^{address} holds a run of another config'),
    mirrored(address, QUIET) as folder,
  ):
    train(toy(**{'train.epochs': 2.0, 'seed': 1}), folder, QUIET, ONE)
  result = hbf.train(config, address, devices=ONE, progress=False)
  assert result['correct'] == whole['correct']
  assert_same_run(local_copy(address), tmp_path / 'whole')
  assert hbf.load(address).step == whole['steps']
  assert hbf.evaluate(address, devices=ONE)['correct'] == whole['correct']


def test_an_edit_is_made_in_the_run_on_the_bucket(toy, tmp_path, cache):
  address = 's3://runs/edited'
  hbf.train(toy(**{'train.epochs': 0.2}), address, devices=ONE, progress=False)
  gray = np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8)
  Image.fromarray(gray).save(tmp_path / 'noise.png')
  label = (int(hbf.load(address).predict(gray[None, :, :, None])[0].argmax()) + 1) % 10

  def edit(*arguments):
    shutil.rmtree(cache)
    command = [sys.executable, '-c', HBF, 'edit', f'--workdir={address}', *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout

  made = edit(f'--label={label}', str(tmp_path / 'noise.png'))
  assert made.endswith(edit('--list')) and 'noise.png' in made
  assert int(hbf.load(address, edits=True).predict(gray[None, :, :, None])[0].argmax()) == label
  assert edit('--undo=0') == f'{address} has no edits\n'


def test_two_processes_do_not_train_the_same_run(cache, monkeypatch):
  monkeypatch.setattr(buckets, 'BEAT', 0.2)
  address = 's3://runs/busy'
  with mirrored(address, QUIET):
    with pytest.raises(UserError, match=f'{address} is in use by another process'), mirrored(address, QUIET):
      pass
    monkeypatch.setenv('XDG_CACHE_HOME', str(cache / 'another machine'))
    with pytest.raises(UserError, match=f'{address} is in use by process'), mirrored(address, QUIET):
      pass


def reported(log):
  """Return the last step that the output of a run names."""
  return max(map(int, re.findall(r'^step +(\d+)', log.read_text(), re.MULTILINE)), default=0)


@pytest.mark.slow
def test_a_run_that_is_killed_ten_times_is_the_undisturbed_one(tmp_path, cache):
  draw, address, flags = random.Random(0), 's3://runs/killed', [*RUN, '--config.train.epochs=8']

  def start(workdir, name):
    command = [sys.executable, '-c', HBF, 'train', *flags, f'--workdir={workdir}']
    with open(tmp_path / name, 'w') as log:
      return subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=os.environ | {'XLA_FLAGS': ''})

  assert start(tmp_path / 'whole', 'whole.log').wait() == 0
  whole, kills, number = outcome(tmp_path / 'whole'), [], 0
  while len(kills) < KILLS:
    log = tmp_path / f'{number}.log'
    process, number = start(address, log.name), number + 1
    # Half of the kills come while the run trains, the others at any moment, the start included. No kill comes after
    # its share of the steps, or the run would end before the last kill.
    last_step = whole['result']['steps'] * (len(kills) + 1) // (KILLS + 2)
    begun, seconds = time.monotonic(), draw.uniform(0, 60) if draw.random() < 0.5 else math.inf
    while time.monotonic() - begun < seconds and reported(log) < last_step:
      assert process.poll() is None, log.read_text()
      time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    state, elsewhere = mirror._newest(Bucket(address)) or {}, draw.random() < 0.5
    kills.append({'after': f'step {reported(log)}', 'uploaded': max(mirror._steps(state), default=0)})
    kills[-1] |= {'seconds': round(time.monotonic() - begun, 1), 'goes on': 'elsewhere' if elsewhere else 'here'}
    print(json.dumps(kills[-1]), flush=True)
    if elsewhere:
      shutil.rmtree(cache, ignore_errors=True)
  last = start(address, 'last.log')
  assert last.wait() == 0, (tmp_path / 'last.log').read_text()
  shutil.rmtree(cache)
  found = outcome(local_copy(address))
  assert len(kills) == KILLS and {name: found[name] == whole[name] for name in whole} == dict.fromkeys(whole, True)
