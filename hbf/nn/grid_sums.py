"""Weighted sums over the patches of an image whose weights are products of one for the row and one for the column."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hbf.ops.layout import explicit_split, laid_out_by_xla


def sums_over_grid(
  values: Float[Array, 'B N H d'], of_rows: Float[Array, 'H R R'], of_columns: Float[Array, 'H C C']
) -> Float[Array, 'B N H d']:
  """Return Σ_rc of_rows[h, i, r] · of_columns[h, j, c] · v[r, c] for each patch (i, j): sums over rows, then columns.

  Each number of the result takes 2(R + C) operations, and not 2RC.

  Args:
    values: v, for the N = R · C patches of an image, row by row.
    of_rows: the weight of each row r for a patch in row i.
    of_columns: the weight of each column c for a patch in column j.
  """
  return laid_out_by_xla(_sums, explicit_split(values), values, of_rows, of_columns)


def _sums(values: jax.Array, of_rows: jax.Array, of_columns: jax.Array) -> jax.Array:
  (batch, _, heads, d), rows, columns = values.shape, of_rows.shape[-1], of_columns.shape[-1]
  z = values.reshape(batch, rows, columns, heads, d).transpose(3, 1, 2, 0, 4)
  z = z.reshape(heads, rows, columns * batch * d)
  z = jnp.einsum('hnr,hrv->hnv', of_rows, z).reshape(heads * rows, columns, batch * d)
  # Each row has a copy of the weights of the columns. Without these copies, XLA would move the axes of the values.
  z = jnp.einsum('gnc,gcv->gnv', jnp.repeat(of_columns, rows, axis=0), z)
  return z.reshape(heads, rows, columns, batch, d).transpose(3, 1, 2, 0, 4).reshape(values.shape)
