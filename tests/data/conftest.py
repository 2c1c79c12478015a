"""Fixtures of the data tests: meshes, sources in memory and members of small archives in the official layouts."""

import jax
import numpy as np
import pytest
from archive_files import encode
from in_memory import random_source
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hbf.data.builders import cifar, tiny_imagenet


@pytest.fixture
def make_source():
  return random_source


@pytest.fixture
def sharding():
  """Return a sharding of batches over all devices."""
  return NamedSharding(Mesh(np.array(jax.devices()), ('data',)), PartitionSpec('data'))


@pytest.fixture
def offline(monkeypatch):
  """Fail a test that uses the network."""

  def refuse(*args, **kwargs):
    raise AssertionError(f'the network was asked for {args}')

  monkeypatch.setattr('socket.socket.connect', refuse)
  monkeypatch.setattr('socket.getaddrinfo', refuse)


@pytest.fixture
def small_cifar(monkeypatch):
  """Let the builders accept archives of 50 + 10 examples. Return the members of both archives.

  The names of the members are without folders.
  """
  monkeypatch.setattr(cifar._Cifar, 'records', {'train': 50, 'test': 10})

  def records(examples, labels, seed):
    generator = np.random.default_rng(seed)
    columns = [generator.integers(0, classes, (examples, 1), dtype=np.uint8) for classes in labels]
    pixels = generator.integers(0, 256, (examples, 3072), dtype=np.uint8)
    return np.concatenate([*columns, pixels], axis=1).tobytes()

  names = {count: '\n'.join(f'class{i:02d}' for i in range(count)).encode() + b'\n\n' for count in (10, 20, 100)}
  cifar10 = {f'cifar-10-batches-bin/data_batch_{i}.bin': records(10, [10], i) for i in range(1, 6)}
  cifar10['cifar-10-batches-bin/test_batch.bin'] = records(10, [10], 6)
  cifar10['cifar-10-batches-bin/batches.meta.txt'] = names[10]
  cifar100 = {
    'cifar-100-binary/train.bin': records(50, [20, 100], 7),
    'cifar-100-binary/test.bin': records(10, [20, 100], 8),
    'cifar-100-binary/coarse_label_names.txt': names[20],
    'cifar-100-binary/fine_label_names.txt': names[100],
  }
  return {'cifar10': cifar10, 'cifar100': cifar100}


@pytest.fixture
def tiny_members():
  """Return the members of a Tiny ImageNet archive with one train and one val image of each class.

  The train image of the first class is gray.
  """
  generator = np.random.default_rng(0)
  classes = [f'n{i:08d}' for i in reversed(range(200))]
  root = tiny_imagenet._ROOT
  members = {f'{root}/wnids.txt': '\n'.join(classes).encode(), f'{root}/words.txt': b''}
  rows = []
  for number, name in enumerate(classes):
    shape = (64, 64) if number == 0 else (64, 64, 3)
    members[f'{root}/train/{name}/images/{name}_0.JPEG'] = encode(generator.integers(0, 256, shape, np.uint8), 'JPEG')
    members[f'{root}/val/images/val_{number}.JPEG'] = encode(generator.integers(0, 256, shape, np.uint8), 'JPEG')
    rows.append(f'val_{number}.JPEG\t{name}\t0\t0\t63\t63')
  members[f'{root}/val/val_annotations.txt'] = '\n'.join(rows).encode()
  return members
