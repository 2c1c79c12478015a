"""Modules that refuse values outside the ranges of their fields."""

import flax.linen as nn

from hbf.options import check_options


class CheckedModule(nn.Module):
  """A module that checks the values of its fields when it is made.

  The allowed values are in a field's annotation. For example, Annotated[int, whole(1)] allows whole numbers from 1.
  """

  def __post_init__(self) -> None:
    """Check the fields.

    Raises:
      OptionError: a field has a value outside its range. An OptionError is a ValueError.
    """
    check_options(self)
    super().__post_init__()
