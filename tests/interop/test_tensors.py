"""Tests of files of tensors: all tensors are read, and no code in a file is run."""

import collections
import io
import json
import os
import pathlib
import pickle
import sys
import types
import zipfile

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from hbf.errors import UserError
from hbf.interop import pth, tensors

TORCH = pathlib.Path(__file__).parent / 'torch.pth'  # made by PyTorch 2.13


def make_tensors():
  matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
  return {'a.weight': matrix, 'transposed': matrix.T, 'scalar': np.float32(2.5), 'none': np.zeros((0, 3), np.float32)}


def assert_same(found, expected):
  assert set(found) == set(expected)
  for name, tensor in expected.items():
    assert found[name].shape == np.shape(tensor), name
    np.testing.assert_array_equal(found[name], tensor, name)


@pytest.mark.parametrize('ending', tensors.READERS)
def test_what_is_written_is_read(tmp_path, ending):
  path = tmp_path / f'file{ending}'
  tensors.write(path, make_tensors())
  assert_same(tensors.read(path), make_tensors())


def test_bfloat16_of_numpy_is_read_and_texts_are_refused(tmp_path):
  numbers = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
  np.savez(tmp_path / 'file.npz', weight=numbers)
  np.testing.assert_array_equal(tensors.read(tmp_path / 'file.npz')['weight'].astype('f'), np.arange(6).reshape(2, 3))
  np.savez(tmp_path / 'file.npz', weight=numbers, names=np.array(['a']))
  with pytest.raises(UserError, match=r"its part 'names' has type <U1; expected numbers"):
    tensors.read(tmp_path / 'file.npz')


@pytest.mark.parametrize('ending', ['.pth', '.npz'])
def test_a_file_that_may_not_be_opened_and_one_in_the_home_folder(ending, tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  tensors.write(tmp_path / f'file{ending}', make_tensors())
  assert_same(tensors.read(pathlib.Path(f'~/file{ending}')), make_tensors())
  if os.geteuid():  # root may open every file
    (tmp_path / f'file{ending}').chmod(0)
    with pytest.raises(UserError, match=r'cannot be read: .*Permission denied'):
      tensors.read(tmp_path / f'file{ending}')


@pytest.mark.parametrize('prefix', ['module.', '_orig_mod.', 'module._orig_mod.', '_orig_mod.module.'])
def test_prefixes_of_pytorch_are_removed_in_any_order(tmp_path, prefix):
  tensors.write(tmp_path / 'file.npz', {prefix + name: array for name, array in make_tensors().items()})
  assert_same(tensors.read(tmp_path / 'file.npz'), make_tensors())


def test_numbers_that_numpy_lacks_are_named(tmp_path):
  header = json.dumps({'weight': {'dtype': 'F8_E4M3', 'shape': [4], 'data_offsets': [0, 4]}}).encode()
  path = tmp_path / 'file.safetensors'
  path.write_bytes(len(header).to_bytes(8, 'little') + header + bytes(4))
  with pytest.raises(UserError, match=r'file\.safetensors .*float8_e4m3fn.*: convert them to float32'):
    tensors.read(path)


def test_a_file_of_pytorch_is_read():
  """The file has the versions of a state_dict, a parameter, views of one storage, and other types than float32."""
  base, flags = np.arange(12).reshape(3, 4), [0, 1, 1]
  expected = {
    'weight': np.arange(6).reshape(2, 3),
    'bias': [-1, 1],
    'parameter': [0.5, 0.25],
    'scalar': 2.5,
    'empty': np.zeros((0, 3)),
    'whole': base,
    'transposed': base.T,
    'part': base[1:, ::2],
    **dict.fromkeys(('half', 'bfloat', 'double', 'long', 'bool'), flags),
  }
  found = tensors.read(TORCH)
  assert_same(found, expected)
  types_ = {name: found[name].dtype for name in ('weight', 'half', 'bfloat', 'double', 'long', 'bool')}
  assert types_ == {
    'weight': np.float32,
    'half': np.float16,
    'bfloat': jnp.bfloat16,
    'double': np.float64,
    'long': np.int64,
    'bool': np.bool_,
  }


def test_pytorch_reads_what_is_written(tmp_path):
  torch = pytest.importorskip('torch')
  tensors.write(tmp_path / 'file.pth', make_tensors())
  found = torch.load(tmp_path / 'file.pth', weights_only=True)
  assert_same({name: tensor.numpy() for name, tensor in found.items()}, make_tensors())


def write_archive(path, pickled, **storages):
  with zipfile.ZipFile(path, 'w') as archive:
    archive.writestr('archive/data.pkl', pickled)
    for key, content in storages.items():
      archive.writestr(f'archive/data/{key}', content)
  return path


class Call:
  """An object whose pickle is a function call."""

  def __init__(self, function, *arguments):
    self.reduced = function, arguments

  def __reduce__(self):
    return self.reduced


@pytest.mark.parametrize(
  ('call', 'name'),
  [
    (Call(exec, 'raise SystemExit'), 'builtins.exec'),
    (Call(getattr, 1, 'real'), 'builtins.getattr'),
    (Call(print, 'hello'), 'builtins.print'),
    (Call(pathlib.Path, 'hello'), 'pathlib'),
    (collections.Counter('abc'), 'collections.Counter'),
    (io.BytesIO(), '_io.BytesIO'),
  ],
  ids=lambda value: value if isinstance(value, str) else '',
)
def test_a_pickle_that_names_anything_else_is_refused_before_it_runs(tmp_path, capsys, call, name):
  path = write_archive(tmp_path / 'evil.pth', pickle.dumps({'weight': call}, protocol=2))
  with pytest.raises(UserError, match=rf'evil.pth cannot be read: it asks for .*{name.split(".")[-1]}'):
    tensors.read(path)
  assert capsys.readouterr().out == ''


def test_pickles_of_newer_protocols_are_held_to_the_same_names(tmp_path):
  """A name in these protocols may have dots, which could lead from an allowed object to another one."""
  stack_global = b'\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93.'
  with pytest.raises(UserError, match=r'it asks for collections\.OrderedDict\.__init__'):
    tensors.read(write_archive(tmp_path / 'evil.pth', stack_global))


def test_only_tensors_by_name_are_read(tmp_path):
  for content, message in (([1, 2], 'holds a list'), ({'epoch': 3}, r'it holds more than tensors \(epoch\)')):
    path = write_archive(tmp_path / 'other.pth', pickle.dumps(content))
    with pytest.raises(UserError, match=message):
      tensors.read(path)


@pytest.mark.parametrize(('numbers', 'offset', 'shape', 'strides'), [
  (4, 0, (5,), (1,)),
  (4, 1, (4,), (1,)),
  (4, -1, (2,), (1,)),
  (4, 0, (2, 2), (3, 1)),
  (4, 3, (2,), (-1,)),
  (4, 0, (-1,), (1,)),
  (4, 0, (1000, 1000), (0, 0)),
  (0, 0, (1,), (1,)),
])  # fmt: skip
def test_a_tensor_outside_of_its_storage_is_refused(tmp_path, monkeypatch, numbers, offset, shape, strides):
  torch = types.ModuleType('torch')
  torch._utils = types.ModuleType('torch._utils')

  class FloatStorage:
    pass

  def _rebuild_tensor_v2():
    pass

  for module, thing in ((torch, FloatStorage), (torch._utils, _rebuild_tensor_v2)):
    thing.__module__, thing.__qualname__ = module.__name__, thing.__name__
    setattr(module, thing.__name__, thing)
    monkeypatch.setitem(sys.modules, module.__name__, module)

  class Pickler(pickle.Pickler):
    def persistent_id(self, thing):
      return thing if isinstance(thing, tuple) and thing[:1] == ('storage',) else None

  storage = ('storage', FloatStorage, '0', 'cpu', numbers)
  stream = io.BytesIO()
  Pickler(stream, protocol=2).dump({'z': Call(_rebuild_tensor_v2, storage, offset, shape, strides, False, {})})
  path = write_archive(tmp_path / 'file.pth', stream.getvalue(), **{'0': np.zeros(numbers, '<f4').tobytes()})
  with pytest.raises(UserError, match='outside its storage'):
    tensors.read(path)


@pytest.mark.parametrize('ending', tensors.READERS)
def test_a_damaged_file_is_a_user_error(tmp_path, ending):
  path = tmp_path / f'file{ending}'
  tensors.write(path, make_tensors())
  whole = path.read_bytes()
  for content in (
    b'',
    whole[: len(whole) // 2],
    b'\x80\x02}q\x00.',
    whole[: len(whole) // 3] + whole[len(whole) // 2 :],
  ):
    path.write_bytes(content)
    with pytest.raises(UserError, match=f'file{ending} cannot be read'):
      tensors.read(path)


def test_arrays_of_python_objects_are_refused(tmp_path):
  np.savez(tmp_path / 'file.npz', z=np.array([print], object))
  with pytest.raises(UserError, match='cannot be read'):
    tensors.read(tmp_path / 'file.npz')


def test_unknown_endings_and_missing_files_are_user_errors(tmp_path):
  with pytest.raises(UserError, match=r"unknown ending of a file of tensors '.ptt': did you mean '.pt'"):
    tensors.read(tmp_path / 'file.ptt')
  with pytest.raises(UserError, match='is not there'):
    tensors.read(tmp_path / 'file.pth')
  with pytest.raises(UserError, match='cannot be written'):
    tensors.write(tmp_path / 'nowhere' / 'file.pth', {})


@pytest.mark.parametrize('ending', tensors.WRITERS)
def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path, monkeypatch, ending):
  with pytest.raises(UserError, match='cannot be written'):
    tensors.write(tmp_path / 'nowhere' / f'file{ending}', {'a': np.ones(3)})
  path = tmp_path / f'file{ending}'
  path.write_bytes(b'before')
  real_writer = tensors.WRITERS[ending]

  def write(draft, arrays):
    real_writer(draft, arrays)
    raise OSError('no space left')

  monkeypatch.setitem(tensors.WRITERS, ending, write)
  with pytest.raises(UserError, match=f'file{ending} cannot be written: no space left'):
    tensors.write(path, {'a': np.ones(3)})
  assert path.read_bytes() == b'before' and [*tmp_path.iterdir()] == [path]
  monkeypatch.undo()
  tensors.write(path, {'a': np.ones(3)})
  np.testing.assert_array_equal(tensors.read(path)['a'], np.ones(3))


def test_a_file_of_another_byte_order_is_refused(tmp_path):
  path = tmp_path / 'file.pth'
  pth.write(path, {})
  with zipfile.ZipFile(path) as archive:
    files = {name: archive.read(name) for name in archive.namelist()}
  with zipfile.ZipFile(path, 'w') as archive:
    for name, content in (files | {'archive/byteorder': b'big'}).items():
      archive.writestr(name, content)
  with pytest.raises(UserError, match='big-endian'):
    tensors.read(path)
