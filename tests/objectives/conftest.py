"""The objectives run where JAX refuses to mix dtypes, as some training loops set it."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield
