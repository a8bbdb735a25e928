"""Float64 for all tests (a test may ask for float32 itself), and hypothesis without deadlines."""

import hypothesis
import jax

jax.config.update("jax_enable_x64", True)

# Compilation makes the first example slow, so a deadline would only measure JAX.
hypothesis.settings.register_profile("stagecert", deadline=None, print_blob=True)
hypothesis.settings.load_profile("stagecert")
