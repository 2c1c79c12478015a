"""Modules that refuse values outside the ranges of their fields."""

import flax.linen as nn

from hbf.options import check_options


class CheckedModule(nn.Module):
  """A module whose fields declare their values, as Annotated[int, whole(1)], and are checked when it is made."""

  def __post_init__(self) -> None:
    """Check the fields.

    Raises:
      OptionError: a field has a value that it can't have. It is a ValueError.
    """
    check_options(self)
    super().__post_init__()
