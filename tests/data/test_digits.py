import subprocess
import sys

import numpy as np
from sklearn import datasets as sklearn_datasets

from hbf.data.datasets import load

_SCRIPT = """
import socket, sys
def refuse(*args, **kwargs):
  raise AssertionError('the network was asked for')
socket.socket.connect = socket.getaddrinfo = refuse
from hbf.data.datasets import load
for _ in ('prepared', 'read'):
  data = load(name='digits', dir=sys.argv[1], root='', image_size=0, download=False)
  data.splits['train'][0]
assert not [name for name in sys.modules if name.partition('.')[0] == 'tensorflow']
"""


def _load(directory, image_size=0):
  return load(name='digits', dir=str(directory), root='', image_size=image_size, download=False)


def test_prepared_on_first_use_without_network_or_tensorflow_and_silent_on_stdout(tmp_path):
  done = subprocess.run([sys.executable, '-c', _SCRIPT, str(tmp_path)], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert done.stdout == ''
  assert [path.name for path in tmp_path.iterdir()] == ['digits']


def test_images_labels_and_split(tmp_path, offline):
  data = _load(tmp_path)
  assert data.image_shape == (8, 8, 1) and data.classes == tuple('0123456789')
  original = sklearn_datasets.load_digits()
  levels = np.round(original.images * 255 / 16).astype(np.uint8)
  expected = sorted((image.tobytes(), int(label)) for image, label in zip(levels, original.target, strict=True))
  examples = {
    split: [(image.tobytes(), label) for image, label in (source[index] for index in range(len(source)))]
    for split, source in data.splits.items()
  }
  assert sorted(examples['train'] + examples['test']) == expected
  share = np.bincount([label for _, label in examples['test']]) / np.bincount(original.target)
  assert (abs(share - 0.2) < 0.01).all()
  image, _ = data.splits['train'][0]
  assert image.shape == (8, 8, 1) and image.dtype == np.uint8


def test_images_are_resized_on_request(tmp_path):
  data = _load(tmp_path, image_size=12)
  assert data.image_shape == data.splits['test'][0][0].shape == (12, 12, 1)
