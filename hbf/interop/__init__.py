"""Weights of other projects. Each module, such as `hbf.interop.google`, is imported when it is first used."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  import hbf.interop.authors as authors
  import hbf.interop.google as google
  import hbf.interop.nanogpt as nanogpt
  import hbf.interop.timm as timm

__all__ = ['authors', 'google', 'nanogpt', 'timm']


def __getattr__(name: str) -> ModuleType:
  """Import a module at its first use (PEP 562)."""
  if name not in __all__:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return importlib.import_module(f'{__name__}.{name}')
