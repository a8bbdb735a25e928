"""Networks from JAX functions: `functions` has the way in."""
