"""A check of the shapes in jaxtyping's annotations, at every call of a public function during the tests."""

import functools
import inspect
import types
import typing

import jax
import jaxtyping


def check_shapes(function):
  """Return a function that raises TypeError if a JAX array is not of its parameter's or result's annotated shape."""
  signature, kinds = inspect.signature(function), {}
  for name, hint in function.__annotations__.items():
    if found := [kind for kind in _alternatives(hint) if _is_shape(kind)]:
      kinds[name] = found

  @functools.wraps(function)
  def checked(*args, **kwargs):
    for name, value in signature.bind(*args, **kwargs).arguments.items():
      _check(function, name, value, kinds)
    result = function(*args, **kwargs)
    _check(function, 'return', result, kinds)
    return result

  return checked


def _check(function, name, value, kinds):
  if isinstance(value, jax.Array) and not any(isinstance(value, kind) for kind in kinds.get(name, [jax.Array])):
    expected = ' or '.join(kind.__name__ for kind in kinds[name])
    raise TypeError(f'{function.__qualname__}: {name} is {value.dtype}{list(value.shape)}, expected {expected}')


def _alternatives(hint):
  return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _is_shape(kind):
  return isinstance(kind, type) and issubclass(kind, jaxtyping.AbstractArray)
