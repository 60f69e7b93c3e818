"""What holds for every test."""

from hypothesis import HealthCheck, settings

# The same examples every time: a suite that fails now and then tells nothing about the change at hand. To look further,
# run with --hypothesis-profile=default and more examples.
settings.register_profile(
    "steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("steady")
